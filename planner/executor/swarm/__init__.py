"""Stochastic wiring: devices choose paths while they run (SWARM)."""
