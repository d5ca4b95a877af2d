"""Measured seconds of F, H, B and update: the calibration file of ``planner run --calibrate``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.workload.compute_times import FIELDS, ComputeTimes
from planner.workload.workload import Workload

FORMAT = "planner.calibration"
SCHEMA_VERSION = 1


def _require(path: str | Path, field: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{path}: {field} is {value}; it must be >= {least}, calibrate again")


@dataclass(frozen=True)
class Calibration:
    """What ``planner run --calibrate`` measured on the actual devices.

    Attributes
    ----------
    software
        Versions, processor, threads.
    date
        ISO date of the measurement.
    times
        Per device id: seconds by field of `ComputeTimes`, for the stage it held.
    layers
        Per device id: the layer range it held when it was measured.
    microbatch_samples
        Samples of the microbatches that were timed.
    link_latency_s, link_bandwidth_bytes_per_s
        Between two of the measured processes.
    """

    date: str
    software: Mapping[str, Any]
    workload: str
    microbatch_samples: int
    times: Mapping[str, Mapping[str, float]]
    layers: Mapping[str, tuple[int, int]]
    link_latency_s: float
    link_bandwidth_bytes_per_s: float

    def to_json_text(self) -> str:
        """JSON text of the calibration file."""
        return (
            json.dumps(
                {
                    "format": FORMAT,
                    "schema_version": SCHEMA_VERSION,
                    "date": self.date,
                    "software": dict(self.software),
                    "workload": self.workload,
                    "microbatch_samples": self.microbatch_samples,
                    "link_latency_s": self.link_latency_s,
                    "link_bandwidth_bytes_per_s": self.link_bandwidth_bytes_per_s,
                    "devices": {
                        name: {"layers": list(self.layers[name]), **times}
                        for name, times in self.times.items()
                    },
                },
                indent=1,
                allow_nan=False,
            )
            + "\n"
        )

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a calibration file."""
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: cannot be read as JSON ({error}); check the file") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{path}: is not a calibration; make one with planner run --calibrate")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path}: schema_version is {data.get('schema_version')!r}; this release reads "
                f"{SCHEMA_VERSION}"
            )
        try:
            found = cls(
                str(data["date"]),
                data["software"],
                str(data["workload"]),
                int(data["microbatch_samples"]),
                {
                    name: {field: float(entry[field]) for field in FIELDS}
                    for name, entry in data["devices"].items()
                },
                {
                    name: (int(entry["layers"][0]), int(entry["layers"][1]))
                    for name, entry in data["devices"].items()
                },
                float(data["link_latency_s"]),
                float(data["link_bandwidth_bytes_per_s"]),
            )
            for name in ("cores", "threads_per_rank"):
                _require(path, f"software.{name}", float(data["software"][name]), 1)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path}: field {error} is missing or malformed; calibrate again"
            ) from None
        _require(path, "microbatch_samples", found.microbatch_samples, 1)
        _require(path, "link_latency_s", found.link_latency_s, 0)
        _require(path, "link_bandwidth_bytes_per_s", found.link_bandwidth_bytes_per_s, 1)
        for name, times in found.times.items():
            start, stop = found.layers[name]
            if not 0 <= start < stop:
                raise ValueError(
                    f"{path}: devices.{name}.layers is [{start}, {stop}]; it must be an ascending "
                    "range, calibrate again"
                )
            for field, value in times.items():
                _require(path, f"devices.{name}.{field}", value, 0)
        return found

    def compute_times(
        self,
        ids: Sequence[str],
        workload: Workload,
        groups: Sequence[Sequence[int]],
        layers: Sequence[tuple[int, int]],
    ) -> ComputeTimes:
        """The measured times for a plan's devices, scaled by FLOPs where the stage differs.

        Raises
        ------
        ValueError
            The calibration was made for another workload, or lacks a device.
        """
        if self.workload != workload.name:
            raise ValueError(
                f"calibration is for workload {self.workload!r}, the plan for {workload.name!r}; "
                "calibrate again"
            )
        missing = [name for name in ids if name not in self.times]
        if missing:
            raise ValueError(
                f"calibration has no device {missing[0]!r}; calibrate the plan's devices"
            )
        for name in ids:
            if self.layers[name][1] > len(workload.layers):
                raise ValueError(
                    f"calibration has layers up to {self.layers[name][1]} on {name!r} but "
                    f"{workload.name} has {len(workload.layers)}; calibrate again"
                )
        columns: dict[str, list[float]] = {field: [0.0] * len(ids) for field in FIELDS}
        scaled = False
        batch = workload.microbatch_samples / self.microbatch_samples
        for group, part in zip(groups, layers, strict=True):
            for d in group:
                measured = self.times[ids[d]]
                was = workload.stage(*self.layers[ids[d]])
                now = workload.stage(*part)
                ratio = now.forward_flops / was.forward_flops * batch
                scaled |= ratio != 1.0
                for field in FIELDS:
                    factor = {"head_s": batch, "update_s": now.parameters / was.parameters}.get(
                        field, ratio
                    )
                    columns[field][d] = measured[field] * factor
        source = f"calibration of {self.date}" + (
            ", scaled by FLOPs to other stages or microbatches" if scaled else ""
        )
        return ComputeTimes(source, *(tuple(columns[field]) for field in FIELDS))
