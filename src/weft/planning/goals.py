"""What a problem minimises, of plans and of steps that are only estimated."""

from __future__ import annotations

from weft.describe.prediction import Prediction
from weft.describe.units import format_bytes, format_seconds
from weft.planning.prices import STEPS_PRICED, cost_of
from weft.planning.problem import Problem


def goal_value(problem: Problem, prediction: Prediction, ranks: int) -> float:
    """What a predicted plan takes of what the problem minimises: seconds, bytes, or the price of a step."""
    if problem.minimise == "memory":
        return float(max(prediction.peak_bytes))
    return goal_of_step(problem, prediction.step_s, ranks)


def goal_words(problem: Problem, prediction: Prediction, ranks: int) -> str:
    """The same, for people."""
    value = goal_value(problem, prediction, ranks)
    if problem.minimise == "memory":
        return format_bytes(round(value))
    if problem.minimise == "cost":
        return f"{value * STEPS_PRICED:.3g} for {STEPS_PRICED} steps"
    return format_seconds(value)


def goal_of_step(problem: Problem, step_s: float, ranks: int) -> float:
    """What a step of so many devices takes of what is minimised: its price, or seconds."""
    return cost_of(problem.job.cluster, step_s, ranks) if problem.minimise == "cost" else step_s
