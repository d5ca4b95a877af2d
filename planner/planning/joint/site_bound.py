"""Lower bound on the mean step from what sites can compute behind their lines.

A site is a set of devices that sends and receives through one line; a device without one is a site
by itself, and devices whose site contains another one are a site without a line. Of the n
microbatches of a step, a site runs a share y_l through layer l, and the shares of all sites add up
to 1 for every layer. In the mean over many steps, of D seconds each, a site

- computes no more than its devices can: the sum of y_l c_l is at most D times their FLOP/s, with
  c_l the FLOPs of a step in layer l. No device computes during a round of its stage, in which the
  last gradients of a layer that is elsewhere, too, leave the site or reach it;
- sends and receives n z |y_l - y_(l+1)| bytes of activations and gradients between neighbouring
  layers at least, with z the size of the smallest message;
- sends and receives as many bytes as layer l has gradients (or parameters, if these are fewer)
  where 0 < y_l < 1: devices elsewhere have the layer too, and both need gradients of the other;
- holds the state of all layers of which it runs some.

Let h be the largest share of a site, k the number of layers it runs, and e the sum of its shares of
the first and the last layer. If it leaves out some layer, the differences add up to at least h, and
to 2 h - e. So its part w of all FLOPs is one of these, and never more than its devices allow:

- 1, if it trains alone;
- less, with some of all layers as a whole, if its line carries (1 - w) n z bytes, as its smallest
  share is at most w, and the gradients of so many layers that it can leave out 1 - w;
- less, with no layer as a whole, if its line carries the gradients of all layers;
- that of k layers as a whole, if its line carries max(1, 2 - e) n z bytes;
- h times that of k layers, if its line carries their gradients and max(h, 2 h - e) n z bytes.

A step needs parts that add up to 1, and e adds up to 2 over all sites. With any price p of e, the
sum of the largest w - p e of all sites must reach 1 - 2 p. The bound is the smallest D for which it
does, for all of some prices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from planner.network.cluster import Cluster, device_limits
from planner.planning.joint.bisection import least_feasible_s
from planner.planning.joint.device_classes import Floats
from planner.planning.joint.stage_requirements import finite_or_none
from planner.training_plan.choices import Head
from planner.workload.costs import BACKWARD_TO_FORWARD, stage_costs
from planner.workload.workload import Workload

PRICES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
"""Prices of e that are tried."""
ROUNDING = 1e-9
"""Parts of a step may add up to as much less: whole layers add up to it exactly."""


class SiteBound(NamedTuple):
    """A lower bound in seconds on the mean step, and what proves it.

    Attributes
    ----------
    seconds
        The bound; infinite if no devices suffice.
    price
        Of e.
    names, figures
        Sites, and rows of their FLOP/s, memory, FLOP/s of their slowest device, and the bytes per
        second of their line and of the last gradients of a round.
    """

    seconds: float
    price: float = 0.0
    names: Sequence[str] = ()
    figures: Floats = np.zeros((5, 0))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form for a witness; null: without limit."""
        keys = "flops", "memory_bytes", "slowest_flops", "line_bytes_per_s", "final_bytes_per_s"
        sites = [
            {"name": name} | {key: finite_or_none(x) for key, x in zip(keys, column, strict=True)}
            for name, column in zip(self.names, self.figures.T.tolist(), strict=True)
        ]
        return {"price": self.price, "sites": sites}


def site_bound(
    cluster: Cluster,
    workload: Workload,
    wire_ratio: float = 1.0,
    *,
    every_steps: int = 1,
    has_aggregators: bool = False,
    heads: Sequence[Head] = (Head.LAST,),
) -> SiteBound:
    """Lower bound on the mean step of every plan, over many steps.

    Parameters
    ----------
    cluster, workload
        The devices that can compute, and what they train.
    wire_ratio
        Bytes of encoded gradients over unencoded ones.
    every_steps
        H, if one step in H averages.
    has_aggregators
        Whether other devices may reduce gradients, and send from the sites of these.
    heads
        Ends of the pipeline that may run head and loss.
    """
    if workload.forward_flops == 0:
        return SiteBound(0.0)
    ratio = min(wire_ratio, workload.spread_ratio) / every_steps
    sites = (
        _Sites(cluster, names, workload, ratio, heads, by_devices=not has_aggregators)
        for names in _partitions(cluster)
    )
    return max((each.bound() for each in sites), key=lambda bound: bound.seconds)


def _partitions(cluster: Cluster) -> list[list[str]]:
    """Sites by device: the innermost, and the outermost if there are sites around sites."""
    devices = cluster.devices
    if devices.sites is None:
        return [list(cluster.network.ids)]
    around = [devices.sites_around(d) for d in range(len(cluster))]
    both = [[sites[0] for sites in around], [sites[-1] for sites in around]]
    return both if both[0] != both[1] else both[:1]


class _Sites:
    """Sites of equal figures, and what a step asks of them.

    Parameters
    ----------
    site_of
        The site of every device.
    gradient_ratio
        Bytes that a step sends of a layer's gradients, over those of all in their own format.
    by_devices
        Whether a site's devices limit what it sends and receives.
    """

    def __init__(
        self,
        cluster: Cluster,
        site_of: Sequence[str],
        workload: Workload,
        gradient_ratio: float,
        heads: Sequence[Head],
        *,
        by_devices: bool,
    ) -> None:
        names, index = np.unique(np.array(site_of), return_inverse=True)
        devices, lines = cluster.devices, []
        # the devices of a site reach one within it without their own line
        total = Counter(site for d in range(len(cluster)) for site in devices.sites_around(d))
        counts = zip(names.tolist(), np.bincount(index).tolist(), strict=True)
        complete = {name for name, count in counts if total[name] == count}
        of_sites = devices.site_upload_bytes_per_s, devices.site_download_bytes_per_s
        for of_site, of_device in zip(of_sites, device_limits(cluster), strict=True):
            stated = {name: rate for name, rate in (of_site or {}).items() if name in complete}
            line = np.array([stated.get(name, np.inf) for name in names.tolist()])
            # a device without a site sends and receives all by itself
            if by_devices or devices.sites is None:
                line = np.minimum(line, np.bincount(index, weights=of_device))
            lines.append(line)
        sums = (np.bincount(index, weights=x) for x in (cluster.flops, cluster.memory_bytes))
        slowest = np.full(len(names), np.inf)
        np.minimum.at(slowest, index, cluster.flops)
        upload, download = lines
        # the last gradients of a round are sent from this site, or from another one to it
        final = np.maximum(upload, np.minimum(download, upload.max()))
        self.figures = np.stack([*sums, slowest, np.minimum(upload, download), final])
        self.names = names.tolist()
        rows, self.counts = np.unique(self.figures, axis=1, return_counts=True)
        self.flops_per_s, self.memory, slowest, self.line, final = rows[:, :, None]
        layers = [stage_costs(workload, k, k + 1) for k in range(len(workload.layers))]
        self.microbatches = workload.batch_samples // workload.microbatch_samples
        flops = np.array([(1 + BACKWARD_TO_FORWARD) * x.forward_flops for x in layers])
        whole = stage_costs(workload, 0, len(layers), with_head=True)
        # the head of one end, on any layer: the parts of k layers are those of the largest
        last = len(layers) - 1 if heads[0] is Head.LAST else 0
        flops[last if len(heads) == 1 else int(np.argmax(flops))] += whole.head_flops
        self.flops = self.microbatches * flops.sum()
        self.part = np.cumsum(np.sort(flops)[::-1]) / flops.sum()
        gradients = np.sort([x.gradient_bytes for x in layers]) * gradient_ratio
        self.gradients = np.cumsum(gradients)
        # parts of a step that a site does not compute in rounds of k layers, at least
        self.lost = slowest * self.gradients / final / self.flops
        state = np.cumsum(np.sort([x.state_bytes for x in layers]))
        # how many layers fit, by site
        self.fits = state <= self.memory * (1 + 1e-6)
        self.message_bytes = self.microbatches * min(
            (x.output_bytes for x in layers[:-1]), default=0.0
        )

    def bound(self) -> SiteBound:
        """Smallest seconds in which parts of all sites add up to a step."""
        scale_s = self.flops / float((self.flops_per_s[:, 0] * self.counts).sum())
        seconds = least_feasible_s(lambda limit: self._excluding_price(limit) is None, scale_s)
        return SiteBound(seconds, self._excluding_price(seconds) or 0.0, self.names, self.figures)

    def _excluding_price(self, seconds: float) -> float | None:
        """A price at which sites cannot do a step in this time."""
        seconds *= 1 + ROUNDING
        # may be above 1: rounds leave less of it
        work = seconds * self.flops_per_s / self.flops
        sent = seconds * self.line
        for price in PRICES:
            if self._value(work, sent, price) < 1 - 2 * price - ROUNDING:
                return price
        return None

    def _value(self, work: Floats, sent: Floats, price: float) -> float:
        """The sum of the largest w - p e of all sites."""
        best = np.where(self.fits[:, -1], self._all_layers(work, sent), 0.0)
        part, fits = self.part[:-1], self.fits[:, :-1]
        if len(part) and self.message_bytes > 0:
            whole = sent / self.message_bytes
            end = np.maximum(2 - whole, 0.0)
            values = np.where(whole >= 1, np.minimum(work, part) - price * end, 0.0)
            best = np.maximum(best, np.where(fits, values, 0.0).max(axis=1))
            carried = (sent - self.gradients[:-1]) / self.message_bytes
            low, high = np.minimum(carried / 2, 1.0), np.minimum(carried, 1.0)
            averaging = work - self.lost[:, :-1]
            for share in (low, np.clip(averaging / part, low, high), high):
                end = np.maximum(2 * share - carried, 0.0)
                values = np.minimum(averaging, share * part) - price * end
                possible = fits & (carried >= 0)
                best = np.maximum(best, np.where(possible, values, 0.0).max(axis=1))
        elif len(part):
            best = np.maximum(best, np.where(fits, np.minimum(work, part), 0.0).max(axis=1))
        return float(best @ self.counts)

    def _all_layers(self, work: Floats, sent: Floats) -> Floats:
        """The largest part of a site that runs some of all layers."""
        part = np.minimum(work, 1.0)
        for _ in range(2):
            # rounds of the layers that are left out in part leave less time, for even less
            fewest = np.searchsorted(self.part, 1 - part[:, 0] - ROUNDING)
            fewest = np.minimum(fewest, len(self.part) - 1)[:, None]
            part = np.clip(work - np.take_along_axis(self.lost, fewest, axis=1), 0.0, 1.0)
        needed = self.message_bytes * (1 - part) + self.gradients[fewest]
        some_whole = np.where(sent >= needed * (1 - ROUNDING), part, 0.0)
        none_whole = np.where(sent >= self.gradients[-1], work - self.lost[:, -1:], 0.0)
        values = np.where(work >= 1, 1.0, np.maximum(some_whole, none_whole))
        return np.maximum(values, 0.0)[:, 0]
