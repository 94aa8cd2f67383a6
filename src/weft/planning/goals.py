"""The minimised quantity of a problem, for plans and for estimated steps, and the cost of steps."""

from __future__ import annotations

from weft.describe.cluster import Cluster
from weft.describe.prediction import Prediction
from weft.describe.units import format_bytes, format_seconds
from weft.errors import InputError, Violation
from weft.planning.problem import Problem

STEPS_PRICED = 1000


def price_per_hour(cluster: Cluster, ranks: int | None = None) -> float | None:
    """Return the price of the nodes of the first `ranks` devices, or of all; None where a device has none. A
    partly used node is paid for as a whole."""
    left = cluster.ranks if ranks is None else ranks
    total = 0.0
    for group in cluster.groups:
        if group.device.price_per_hour is None:
            return None
        nodes = min(group.count, -(-max(0, left) // group.devices))
        total += group.device.price_per_hour * nodes * group.devices
        left -= group.count * group.devices
    return total


def unpriced(cluster: Cluster) -> str | None:
    """Return the first device without a price where others have one; None where all or none have one."""
    missing = [group.device.name for group in cluster.groups if group.device.price_per_hour is None]
    return missing[0] if 0 < len(missing) < len(cluster.groups) else None


def require_prices(cluster: Cluster) -> None:
    """Refuse a cluster with devices without prices.

    Raises:
        InputError: with the name of a device.
    """
    missing = [group.device.name for group in cluster.groups if group.device.price_per_hour is None]
    if missing:
        problem = f"'cost' needs a price: give [device.{missing[0]}] price_per_hour in a cluster file"
        raise InputError(Violation("goal.minimise", problem, "time"))


def cost_of(cluster: Cluster, step_s: float, ranks: int) -> float:
    """Return the cost of a step on the first `ranks` devices; 0 where devices have no price."""
    return (price_per_hour(cluster, ranks) or 0.0) * step_s / 3600.0


def cost_per_million(problem: Problem, step_s: float, ranks: int | None = None) -> float | None:
    """Return the cost of a million tokens, or of images or samples without tokens.

    It pays for the nodes of the first `ranks` devices, or of all; None where a device has no price.
    """
    price = price_per_hour(problem.job.cluster, ranks)
    tokens = problem.job.global_batch * problem.tokens_per_sample
    return None if price is None else price * step_s / 3600.0 / tokens * 1e6


def cost_words(problem: Problem, step_s: float, ranks: int) -> str | None:
    """Return the cost of a million tokens, images or samples in words; None where a device has no price."""
    cost = cost_per_million(problem, step_s, ranks)
    return None if cost is None else f"{cost:.3g} per million {problem.model.unit}"


def goal_value(problem: Problem, prediction: Prediction, ranks: int) -> float:
    """Return the minimised quantity of a predicted plan: seconds, bytes, or the price of a step."""
    if problem.minimise == "memory":
        return float(max(prediction.peak_bytes))
    return goal_of_step(problem, prediction.step_s, ranks)


def goal_words(problem: Problem, prediction: Prediction, ranks: int) -> str:
    """Return the value of `goal_value` in words."""
    value = goal_value(problem, prediction, ranks)
    if problem.minimise == "memory":
        return format_bytes(round(value))
    if problem.minimise == "cost":
        return f"{value * STEPS_PRICED:.3g} for {STEPS_PRICED} steps"
    return format_seconds(value)


def goal_of_step(problem: Problem, step_s: float, ranks: int) -> float:
    """Return the minimised quantity of a step on `ranks` devices: its price, or seconds."""
    return cost_of(problem.job.cluster, step_s, ranks) if problem.minimise == "cost" else step_s
