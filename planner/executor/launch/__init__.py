"""Command-line options, processes of a run, and calibration."""
