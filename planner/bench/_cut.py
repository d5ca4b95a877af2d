"""``python -m planner.bench._cut 3 4``: cuts the namespace it runs in off from these devices."""

from __future__ import annotations

import sys

from planner.emulate.namespaces import cut

if __name__ == "__main__":
    cut([int(word) for word in sys.argv[1:]])
