"""``python -m benchmarks.faults.cut cut 3 4``: disconnect namespaces; ``mend`` reconnects them."""

from __future__ import annotations

import sys

from planner.emulate.namespaces import cut, mend

if __name__ == "__main__":
    {"cut": cut, "mend": mend}[sys.argv[1]]([int(word) for word in sys.argv[2:]])
