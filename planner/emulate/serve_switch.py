"""Process of the switch: ``python -m planner.emulate.serve_switch FOLDER``.

`network` starts it and passes the descriptors of the TUN devices. It ends when its standard input
closes, also if its parent is killed. The loop is imported rather than defined here, because
compiled code is cached only if its types do not belong to the main module.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numba import typeof

from planner.emulate.links import EmulatedLinks
from planner.emulate.queues import BUSY, LOST, ORDER, empty_queues
from planner.emulate.switch import carry, ports_of

RECORDS = 400_000
"""Most busy times of pairs that are recorded."""


def main() -> int:
    """Run the switch of a folder and return the exit code."""
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "switch.json").read_text())
    arrays = np.load(folder / "links.npz")
    links = EmulatedLinks(*(arrays[name] for name in EmulatedLinks._fields))
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    q = empty_queues(links, settings["slots"], RECORDS)
    ports = ports_of(settings["tuns"], settings["slots"], settings["packet_bytes"])
    compiled: Any = carry
    kinds: Any = typeof
    compiled.compile((kinds(links), kinds(q), kinds(ports)))
    print("ready", flush=True)
    began_s = sum(os.times()[:2])
    carry(links, q, ports)
    count, late_s, most_late_s = (float(x) for x in ports.late)
    np.save(folder / "busy.npy", q.busy[: q.numbers[BUSY]])
    report = {
        "packets": int(q.numbers[ORDER]),
        "lost": int(q.numbers[LOST]),
        "late_s": late_s / max(count, 1.0),
        "most_late_s": most_late_s,
        "cpu_s": sum(os.times()[:2]) - began_s,
    }
    print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
