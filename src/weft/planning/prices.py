"""What a step costs: the nodes that a plan uses, by the hour, in the currency of their devices' prices."""

from __future__ import annotations

from weft.describe.cluster import Cluster
from weft.errors import InputError, Violation

STEPS_PRICED = 1000


def price_per_hour(cluster: Cluster, ranks: int | None = None) -> float | None:
    """Of the nodes of the first `ranks` devices, or of all; None where a device has no price.

    A node that is used in part is paid for as a whole.
    """
    left = cluster.ranks if ranks is None else ranks
    total = 0.0
    for group in cluster.groups:
        if group.device.price_per_hour is None:
            return None
        nodes = min(group.count, -(-max(0, left) // group.devices))
        total += group.device.price_per_hour * nodes * group.devices
        left -= group.count * group.devices
    return total


def require_prices(cluster: Cluster) -> None:
    """Refuse a cluster whose devices have no prices.

    Raises:
        InputError: naming the devices.
    """
    missing = [group.device.name for group in cluster.groups if group.device.price_per_hour is None]
    if missing:
        problem = f"'cost' needs a price: give [device.{missing[0]}] price_per_hour in a cluster file"
        raise InputError(Violation("goal.minimise", problem, "time"))


def cost_of(cluster: Cluster, step_s: float, ranks: int) -> float:
    """Of a step on the first `ranks` devices; 0 where devices have no price."""
    return (price_per_hour(cluster, ranks) or 0.0) * step_s / 3600.0
