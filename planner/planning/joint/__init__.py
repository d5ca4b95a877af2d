"""Joint search over all decisions, and the bound for every plan."""
