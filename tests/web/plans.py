"""Plans for the tests of what is shown of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import weft
from weft.describe.run_file import run_of_keywords
from weft.planning.curve import Curve, curve
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import problem_of


@cache
def two_stages() -> PlannedJob:
    """Two stages in two replicas, on some of twelve devices."""
    return weft.plan(
        model="gpt-1m", on="4xa100-80gb+8xt4", global_batch=8, precision="fp16", pp=2, dp=2, tp=1
    ).job


@cache
def branches() -> PlannedJob:
    """Two towers side by side, each of several stages."""
    pins = {"planner": "graphpipe", "dp": 1, "micro_batch_size": 4}
    return weft.plan(model="mmt-tiny", on="4xt4", global_batch=32, **pins).job


def planned(**pins: Any) -> PlannedJob:
    """A small model on two devices, with pins of the caller."""
    return weft.plan(model="gpt-1m", on="2xt4", global_batch=8, tp=1, **pins).job


@cache
def searched() -> PlannedJob:
    pins = {"schedule": "1f1b", "sharding": "zero-1"}
    run = run_of_keywords(
        model="llama-7b", on="8xa100-80gb", global_batch=32, sequence=None, precision="bf16", pins=pins
    )
    return plan_run(run)


@cache
def small_curve() -> Curve:
    return curve(problem_of(model="gpt-1m", on="4xv100-32gb", precision="fp16"), samples_per_device=(0.25, 2))
