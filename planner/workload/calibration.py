"""Measured compute times: the calibration file of ``planner run --calibrate``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.network.cluster import Cluster
from planner.network.dtype import Dtype
from planner.utils.input_files import read_json
from planner.utils.text import counted
from planner.utils.validate import (
    LARGEST,
    SMALLEST,
    choice,
    count,
    instance_of,
    mapping,
    real,
    sequence,
)
from planner.workload.compute_times import COSTS, FIELDS, ComputeTimes
from planner.workload.costs import repeated_share, stage_costs
from planner.workload.workload import MAX_SAMPLES, Workload

FORMAT = "planner.calibration"
SCHEMA_VERSION = 1
SAME = 1e-6
"""Relative tolerance for the FLOPs of a sample."""


def _range(name: str, layers: Any) -> tuple[int, int]:
    start, stop = layers[:2]
    label = f"layers of {name!r}"
    return count(label, start, 0), count(label, stop)


@dataclass(frozen=True)
class Calibration:
    """Compute times measured by ``planner run --calibrate``.

    Attributes
    ----------
    date
        ISO date of the measurement.
    software
        Versions, processor, threads; ``gpus``, the number of GPUs if ranks used them.
    workload
        Name of the measured workload.
    microbatch_samples
        Samples per measured microbatch.
    times
        By device id: seconds by field of `ComputeTimes`, for the stage it held.
    layers
        By device id: layers ``(start, stop)`` of that stage.
    link_latency_s, link_bandwidth_bytes_per_s
        Between two of the measured processes.
    operation_s, message_s
        Overhead of the executor per operation and per message; see `ComputeTimes`.
    compute
        Format of compute.
    sample_flops
        FLOPs of the whole model's forward pass for a sample; None if not recorded.
    alike
        Devices that were not measured themselves; see `completed`.

    Raises
    ------
    ValueError
        A field is missing or invalid.
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
    sample_flops: float | None = None
    alike: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        instance_of(str, self.date, "date")
        instance_of(str, self.workload, "workload")
        for field in ("software", "times", "layers"):
            mapping(field, getattr(self, field))
        count("microbatch_samples", self.microbatch_samples, most=MAX_SAMPLES)
        if self.sample_flops is not None:
            real("sample_flops", self.sample_flops, 0)
        names = sequence("alike", self.alike)
        object.__setattr__(self, "alike", tuple(instance_of(str, name, "alike") for name in names))
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
            ends = sequence(f"devices.{name}.layers", self.layers[name])
            ends = tuple(count(f"devices.{name}.layers", end, 0) for end in ends)
            if len(ends) != 2 or ends[0] >= ends[1]:
                raise ValueError(
                    f"devices.{name}.layers is {list(ends)}; it must be an ascending range"
                )

    def __repr__(self) -> str:
        return f"Calibration({self.workload!r}, {counted(len(self.times), 'device')}, {self.date})"

    def to_json_text(self) -> str:
        """Content of the calibration file."""
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
                    **({} if self.sample_flops is None else {"sample_flops": self.sample_flops}),
                    **({"alike": list(self.alike)} if self.alike else {}),
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
            Path of the file.

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
            if data["software"].get("gpus") is not None:
                count("software.gpus", data["software"]["gpus"])
            mapping("devices", data["devices"])
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
                real("link_latency_s", data["link_latency_s"]),
                real("link_bandwidth_bytes_per_s", data["link_bandwidth_bytes_per_s"]),
                operation_s=real("operation_s", data.get("operation_s", 0.0)),
                message_s=real("message_s", data.get("message_s", 0.0)),
                # files without it are of releases that computed in fp32
                compute=data.get("compute", Dtype.FP32),
                sample_flops=data.get("sample_flops"),
                alike=data.get("alike", ()),
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path}: field {error} is missing or malformed; calibrate again"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}; calibrate again") from None

    @property
    def at_once(self) -> int:
        """Number of ranks that compute at full speed at the same time.

        With several GPUs ranks stay on theirs, so two on the same GPU may be slower than this
        assumes.
        """
        gpus = self.software.get("gpus")
        if gpus is not None:
            return int(gpus)
        return max(1, int(self.software["cores"] // self.software["threads_per_rank"]))

    @property
    def updates(self) -> bool:
        """Whether optimizer steps take time on some device."""
        return any(times["update_s"] > 0 for times in self.times.values())

    def require(self, workload: Workload, names: Sequence[str]) -> None:
        """Refuse a calibration of something else.

        Parameters
        ----------
        workload
            What is trained.
        names
            Devices whose times are needed.

        Raises
        ------
        ValueError
            It is for another workload, sample or format, or for more layers.
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
        timed, flops = self.sample_flops, workload.forward_flops
        if timed is not None and abs(timed - flops) > SAME * max(timed, flops):
            raise ValueError(
                f"calibration is of samples of {timed:.4g} FLOPs forward, the plan's have "
                f"{flops:.4g}: of another sequence, or model; calibrate again"
            )
        for name in names:
            if name in self.times and self.layers[name][1] > len(workload.layers):
                raise ValueError(
                    f"calibration has layers up to {self.layers[name][1]} on {name!r} but "
                    f"{workload.name} has {len(workload.layers)}; calibrate again"
                )

    def speed(self, name: str, workload: Workload) -> float:
        """FLOP/s of a measured device over F and B of its stage.

        Parameters
        ----------
        name
            Device id.
        workload
            The workload of the stage.

        Raises
        ------
        ValueError
            F or B took no time, or times and FLOPs are inconsistent.
        """
        costs = stage_costs(workload, *self.layers[name])
        samples = self.microbatch_samples / workload.microbatch_samples
        seconds = [self.times[name][field] for field in ("forward_s", "backward_s")]
        if min(seconds) <= 0:
            raise ValueError(
                f"devices.{name}: F and B take {seconds} s; both must take some time, calibrate "
                "again"
            )
        flops_per_s = (costs.forward_flops + costs.backward_flops) * samples / sum(seconds)
        if not SMALLEST < flops_per_s < LARGEST:
            raise ValueError(
                f"devices.{name}: F and B of layers {list(self.layers[name])} take {seconds} s, "
                f"which would be {flops_per_s:.3g} FLOP/s; calibrate again"
            )
        return flops_per_s

    def completed(self, cluster: Cluster, workload: Workload) -> Calibration:
        """A copy with times for devices that were not measured, taken from an equal device.

        Of the measured devices with the same FLOP/s, the one with the median speed is used: devices
        that a plan leaves out cannot be measured.

        Parameters
        ----------
        cluster
            All devices that may take part.
        workload
            What is trained.

        Returns
        -------
        Calibration
            Of all devices that can compute.

        Raises
        ------
        ValueError
            It is for another workload, or no equal device was measured.
        """
        ids, flops = cluster.network.ids, cluster.flops.tolist()
        computes = np.flatnonzero(np.asarray(cluster.devices.can_compute)).tolist()
        self.require(workload, [ids[d] for d in computes])
        missing = [d for d in computes if ids[d] not in self.times]
        measured = [d for d in computes if ids[d] in self.times]
        if not missing:
            return self
        if not measured:
            raise ValueError(
                f"calibration has none of the devices that can compute, such as "
                f"{ids[missing[0]]!r}; it has {', '.join(map(repr, list(self.times)[:3]))}: "
                "calibrate a plan on the same network"
            )
        measured.sort(key=lambda d: self.speed(ids[d], workload))
        times, layers = dict(self.times), dict(self.layers)
        for d in missing:
            same = [ids[k] for k in measured if flops[k] == flops[d]]
            if not same:
                raise ValueError(
                    f"calibration has no device {ids[d]!r}, nor another with its {flops[d]:g} "
                    "FLOP/s; calibrate a plan that has one, or plan without it"
                )
            median_device = same[len(same) // 2]
            times[ids[d]], layers[ids[d]] = times[median_device], layers[median_device]
        estimated = (*self.alike, *(ids[d] for d in missing))
        return replace(self, times=times, layers=layers, alike=estimated)

    def compute_times(
        self,
        ids: Sequence[str],
        workload: Workload,
        groups: Sequence[Sequence[int]],
        layers: Sequence[tuple[int, int]],
        recompute: Sequence[int] = (),
        head_stage: int | None = None,
    ) -> ComputeTimes:
        """Compute times for a plan's devices, scaled by FLOPs where the stage differs.

        F and B are measured without recomputation. B of a stage that recomputes takes that part of
        F in addition. A device measured without a head is assumed to be as fast with it as with its
        layers.

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
            Per stage, how many of its first layers are recomputed; empty if none is.
        head_stage
            The stage that runs head and loss; None for the last.

        Returns
        -------
        ComputeTimes
            Seconds per device; its source states whether, and for how many devices, they were
            scaled.

        Raises
        ------
        ValueError
            The calibration is for another workload or format, or lacks a device.
        """
        used = [ids[d] for group in groups for d in group]
        self.require(workload, used)
        missing = [name for name in used if name not in self.times]
        if missing:
            raise ValueError(
                f"calibration has no device {missing[0]!r}; calibrate the plan's devices"
            )
        columns: dict[str, list[float]] = {field: [0.0] * len(ids) for field in FIELDS}
        scaled, without_head = False, 0
        head_stage = len(groups) - 1 if head_stage is None else head_stage
        batch = workload.microbatch_samples / self.microbatch_samples
        recomputed = recompute or (0,) * len(groups)
        for j, (group, span, first) in enumerate(zip(groups, layers, recomputed, strict=True)):
            again = repeated_share(workload, span, first)
            for d in group:
                measured = self.times[ids[d]]
                was = workload.stage(*self.layers[ids[d]])
                planned = workload.stage(*span)
                if not was.forward_flops:
                    raise ValueError(
                        f"devices.{ids[d]}: layers {list(self.layers[ids[d]])} have no FLOPs that "
                        "times could be scaled by; calibrate a plan that gives it others"
                    )
                ratio = planned.forward_flops / was.forward_flops * batch
                scaled |= ratio != 1.0
                measured_parameters, planned_parameters = was.parameters, planned.parameters
                if measured["head_s"] > 0:
                    measured_parameters += workload.head_parameters(self.layers[ids[d]][0])
                if j == head_stage:
                    planned_parameters += workload.head_parameters(span[0])
                # without parameters there is no update to scale
                updated = planned_parameters / measured_parameters if measured_parameters else 1.0
                for field in FIELDS:
                    factor = {"head_s": batch, "update_s": updated}.get(field, ratio)
                    columns[field][d] = measured[field] * factor
                if not measured["head_s"] and workload.head.forward_flops:
                    without_head += j == head_stage
                    costs = stage_costs(workload, *span, with_head=True)
                    columns["head_s"][d] = costs.head_flops / self.speed(ids[d], workload)
                columns["backward_s"][d] += again * columns["forward_s"][d]
        source = f"calibration of {self.date}"
        if scaled:
            source += ", scaled by FLOPs to other stages or microbatches"
        if without_head:
            source += f", the head of {counted(without_head, 'device')} as fast as their layers"
        if alike := set(used) & set(self.alike):
            source += f", {counted(len(alike), 'device')} taken for as fast as alike ones"
        return ComputeTimes.from_dict(
            {"source": source, **columns, **{name: getattr(self, name) for name in COSTS}}
        )
