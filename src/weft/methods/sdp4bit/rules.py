"""The rules of SDP4Bit for layouts and plans: replicas that shard their states, all of them together."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import Plan, Sharding
from weft.describe.plan_file import PlanRule
from weft.describe.synchronisation import sync_options
from weft.errors import InputError, Violation
from weft.methods.sdp4bit.options import NAME, Sdp4BitOptions, options_of
from weft.methods.sdp4bit.program import NOBODY
from weft.moves.composition import Composition
from weft.moves.sharers import replicas_of

UNSHARED = "replicas that each step all weights tell each other no weights"
ISLANDS = "it has two levels of its own, and islands would add a third"
NOTHING_KEPT = "replicas keep no whole weights, to which a difference could be added"


def _problem(
    options: Sdp4BitOptions, sharding: Sharding, island: int | None, replicas: int
) -> tuple[str, str, str] | None:
    """Return the first reason to refuse: (reason, key, nearest valid value)."""
    if replicas == 1:
        return NOBODY, "sync.method", "dense"
    if sharding == "zero-0":
        return UNSHARED, "sharding", "zero-1"
    if island is not None:
        return ISLANDS, "island", "none"
    if sharding == "zero-3" and options.weights != "whole":
        return NOTHING_KEPT, "sync.weights", "whole"
    if options.smooth and options.gradient_group % 32:
        return "smoothing transforms 32 gradients at a time", "sync.gradient_group", "128"
    return None


def _of_layout(job: Job, layout: Layout) -> str | None:
    if layout.sync != NAME:
        return None
    options = sync_options(NAME, {**job.sync_options, **layout.sync_options})
    assert isinstance(options, Sdp4BitOptions), "its own table checks them"
    found = _problem(options, layout.sharding, layout.island, replicas_of(layout))
    return None if found is None else f"{NAME}: {found[0]}; nearest {found[1]}: {found[2]}"


def _of_plan(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    try:
        options = options_of(plan)
    except InputError as error:
        yield from error.violations
        return
    if options is None:
        return
    replicas = min(len(stage.replicas) for stage in plan.stages)
    found = _problem(options, plan.sharding, plan.island, replicas)
    if found is not None:
        reason, key, near = found
        if key.startswith("sync."):
            key, near = "sync", f"{key.removeprefix('sync.')} = {near}"
        yield Violation(f"plan: {key}", f"{NAME}: {reason}", near)


RULES = (
    Composition(
        method=NAME,
        other="one replica, whole states, islands; weight differences with zero-3",
        reason=f"{NOBODY}; {UNSHARED}; {ISLANDS}; {NOTHING_KEPT}",
        refuse=_of_layout,
    ),
    PlanRule(refuse=_of_plan),
)
