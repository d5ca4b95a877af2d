"""Utilities shared by several packages: text, files, validation, argument parser."""
