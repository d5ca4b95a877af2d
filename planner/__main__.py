"""Run the command line as ``python -m planner``."""

import sys

from planner.cli.start import main

sys.exit(main())
