"""Measured seconds of F, H, B and update: the calibration file of ``planner run --calibrate``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.network.dtype import Dtype
from planner.network.files import read_json
from planner.network.values import choice, count, mapping, of_kind, real, several
from planner.network.words import some
from planner.workload.compute_times import COSTS, FIELDS, ComputeTimes
from planner.workload.workload import Workload

FORMAT = "planner.calibration"
SCHEMA_VERSION = 1


LINK = ("link_latency_s", "link_bandwidth_bytes_per_s")


def _range(name: str, layers: Any) -> tuple[int, int]:
    start, stop = layers[:2]
    what = f"layers of {name!r}"
    return count(what, start, 0), count(what, stop)


@dataclass(frozen=True)
class Calibration:
    """What ``planner run --calibrate`` measured on the actual devices.

    Attributes
    ----------
    date
        ISO date of the measurement.
    software
        Versions, processor, threads.
    workload
        Name of the workload that was timed.
    microbatch_samples
        Samples of the microbatches that were timed.
    times
        Per device id: seconds by field of `ComputeTimes`, for the stage it held.
    layers
        Per device id: the layer range ``(start, stop)`` it held when it was measured.
    link_latency_s, link_bandwidth_bytes_per_s
        Between two of the measured processes.
    operation_s, message_s
        What the executor itself adds to an operation and to a message; see `ComputeTimes`.
    compute
        The format in which it was computed.

    Raises
    ------
    ValueError
        A field is missing, negative or something else.
    """

    date: str
    software: Mapping[str, Any]
    workload: str
    microbatch_samples: int
    times: Mapping[str, Mapping[str, float]]
    layers: Mapping[str, tuple[int, int]]
    link_latency_s: float
    link_bandwidth_bytes_per_s: float
    operation_s: float = 0.0
    message_s: float = 0.0
    compute: Dtype = Dtype.FP32

    def __post_init__(self) -> None:
        of_kind(str, self.date, "date")
        of_kind(str, self.workload, "workload")
        for field in ("software", "times", "layers"):
            mapping(field, getattr(self, field))
        count("microbatch_samples", self.microbatch_samples)
        real("link_latency_s", self.link_latency_s, 0)
        real("link_bandwidth_bytes_per_s", self.link_bandwidth_bytes_per_s, 1)
        for name in COSTS:
            real(name, getattr(self, name), 0)
        object.__setattr__(self, "compute", choice(Dtype, "compute", self.compute))
        for name, times in self.times.items():
            lacks = [f for f in FIELDS if f not in mapping(f"devices.{name}", times)]
            if lacks or name not in self.layers:
                missing = lacks[0] if lacks else "layers"
                raise ValueError(f"devices.{name}.{missing} is missing; give every field")
            for field in FIELDS:
                real(f"devices.{name}.{field}", times[field], 0)
            ends = several(f"devices.{name}.layers", self.layers[name])
            ends = tuple(count(f"devices.{name}.layers", end, 0) for end in ends)
            if len(ends) != 2 or ends[0] >= ends[1]:
                raise ValueError(
                    f"devices.{name}.layers is {list(ends)}; it must be an ascending range"
                )

    def __repr__(self) -> str:
        return f"Calibration({self.workload!r}, {some(len(self.times), 'device')}, {self.date})"

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
                    "compute": self.compute,
                    "link_latency_s": self.link_latency_s,
                    "link_bandwidth_bytes_per_s": self.link_bandwidth_bytes_per_s,
                    **{name: getattr(self, name) for name in COSTS},
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
        """Read a calibration file.

        Parameters
        ----------
        path
            Of the file.

        Returns
        -------
        Calibration
            Validated.

        Raises
        ------
        ValueError
            One line with the path, the field and what is wrong.
        """
        data = read_json(path)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{path}: is not a calibration; make one with planner run --calibrate")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path}: schema_version is {data.get('schema_version')!r}; this release reads "
                f"{SCHEMA_VERSION}"
            )
        try:
            for name in ("cores", "threads_per_rank"):
                real(f"software.{name}", data["software"][name], 1)
            return cls(
                str(data["date"]),
                data["software"],
                str(data["workload"]),
                count("microbatch_samples", data["microbatch_samples"]),
                {
                    name: {
                        field: real(f"device {name!r}: {field}", entry[field]) for field in FIELDS
                    }
                    for name, entry in data["devices"].items()
                },
                {name: _range(name, entry["layers"]) for name, entry in data["devices"].items()},
                **{field: real(field, data[field]) for field in LINK},
                **{field: real(field, data.get(field, 0.0)) for field in COSTS},
                # files that do not say it are of releases that computed in fp32
                compute=data.get("compute", Dtype.FP32),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path}: field {error} is missing or malformed; calibrate again"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}; calibrate again") from None

    def compute_times(
        self,
        ids: Sequence[str],
        workload: Workload,
        groups: Sequence[Sequence[int]],
        layers: Sequence[tuple[int, int]],
        recompute: Sequence[bool] = (),
    ) -> ComputeTimes:
        """The measured times for a plan's devices, scaled by FLOPs where the stage differs.

        F and B are measured without recomputation, whatever the plan: B of a stage that recomputes
        its activations takes the F that it runs again on top.

        Parameters
        ----------
        ids
            Names of the N devices.
        workload
            What is trained.
        groups
            Devices of every stage.
        layers
            Layers ``(start, stop)`` of every stage.
        recompute
            Per stage, whether it recomputes its activations; empty: none does.

        Returns
        -------
        ComputeTimes
            Seconds per device; its source says whether they were scaled.

        Raises
        ------
        ValueError
            The calibration was made for another workload or format, or lacks a device.
        """
        if self.workload != workload.name:
            raise ValueError(
                f"calibration is for workload {self.workload!r}, the plan for {workload.name!r}; "
                "calibrate again"
            )
        if self.compute is not workload.precision.compute:
            raise ValueError(
                f"calibration is of products in {self.compute}, the plan's are in "
                f"{workload.precision.compute}; calibrate again, or plan with --precision "
                f"{self.compute}"
            )
        held = {d for group in groups for d in group}
        names = [name for d, name in enumerate(ids) if d in held]
        missing = [name for name in names if name not in self.times]
        if missing:
            raise ValueError(
                f"calibration has no device {missing[0]!r}; calibrate the plan's devices"
            )
        for name in names:
            if self.layers[name][1] > len(workload.layers):
                raise ValueError(
                    f"calibration has layers up to {self.layers[name][1]} on {name!r} but "
                    f"{workload.name} has {len(workload.layers)}; calibrate again"
                )
        columns: dict[str, list[float]] = {field: [0.0] * len(ids) for field in FIELDS}
        scaled = False
        batch = workload.microbatch_samples / self.microbatch_samples
        again = recompute or (False,) * len(groups)
        for group, part, twice in zip(groups, layers, again, strict=True):
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
                if twice:
                    columns["backward_s"][d] += columns["forward_s"][d]
        source = f"calibration of {self.date}" + (
            ", scaled by FLOPs to other stages or microbatches" if scaled else ""
        )
        return ComputeTimes.from_dict(
            {"source": source, **columns, **{name: getattr(self, name) for name in COSTS}}
        )
