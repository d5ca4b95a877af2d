"""Compiles kernels into the wheel, where there is a C compiler; if not, numba does at first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs `planner.search.ahead` on the sources that are packed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the extensions; a wheel that has them is one for this Python and machine."""
        root = Path(self.root)
        command = [sys.executable, "-m", "planner.search.ahead"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            self.app.display_warning(f"kernels will be compiled at first use: {last}")
            return
        build_data["pure_python"], build_data["infer_tag"] = False, True
        build_data["artifacts"] += ["/planner/_kernels.json", "/planner/_*kernels*.so"]
        build_data["artifacts"] += ["/planner/_*kernels*.pyd"]
