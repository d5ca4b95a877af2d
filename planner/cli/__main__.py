"""Run the command line as ``python -m planner.cli``."""

import sys

from planner.cli.start import main

sys.exit(main())
