"""A plan's devices on another measurement of their network."""

from __future__ import annotations

from planner.network.error import NetworkError
from planner.network.network import Network
from planner.training_plan.model import TrainingPlan


def network_for(plan: TrainingPlan, network: Network) -> Network:
    """Another measurement for a plan's devices, by device id or by region.

    A network of regions is expanded to the plan's devices; links within a region, which it lacks,
    stay as in the plan.
    """
    planned = plan.cluster.network
    if set(planned.ids) <= set(network.ids):
        return network.subset(planned.ids)
    missing = sorted(set(planned.regions) - set(network.ids))
    if missing:
        names = dict.fromkeys((planned.ids[0], planned.regions[0]))
        raise NetworkError(
            f"the network has neither the plan's devices nor its region {missing[0]!r}; give one "
            f"with ids such as {' or '.join(map(repr, names))}"
        )
    index = [network.index_of(region) for region in planned.regions]
    latency = planned.latency_s.copy()
    bandwidth = planned.bandwidth_bytes_per_s.copy()
    for i, a in enumerate(index):
        for j, b in enumerate(index):
            if a != b:
                latency[i, j] = network.latency_s[a, b]
                bandwidth[i, j] = network.bandwidth_bytes_per_s[a, b]
    return planned.replace(latency_s=latency, bandwidth_bytes_per_s=bandwidth)
