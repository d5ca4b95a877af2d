"""Command line, set-up and processes of a run."""
