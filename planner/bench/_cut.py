"""``python -m planner.bench._cut cut 3 4``: its namespace is cut off from these, or ``mend``ed."""

from __future__ import annotations

import sys

from planner.emulate.namespaces import cut, mend

if __name__ == "__main__":
    {"cut": cut, "mend": mend}[sys.argv[1]]([int(word) for word in sys.argv[2:]])
