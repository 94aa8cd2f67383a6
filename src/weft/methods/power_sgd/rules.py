"""The rules of PowerSGD: several replicas, that hold whole gradients of constant scale."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.cluster import Cluster
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import SCALED, Plan, Sharding
from weft.describe.plan_file import PlanRule
from weft.errors import InputError, Violation
from weft.methods.power_sgd.options import NAME, options_of
from weft.moves.composition import Composition
from weft.moves.sharers import replicas_of

NOBODY = "one replica sends nothing"
WHOLE = "every replica keeps an error as large as its whole gradients, which {} shards"
ISLANDS = "factors of a shard differ from those of the matrix"
UNEQUAL = "devices of several kinds round the factors differently, and replicas would drift apart"
SCALE = "errors have the scale of earlier losses, and {} changes it"


def problem_of(
    sharding: Sharding, island: int | None, precision: str, replicas: int, device_kinds: int = 1
) -> tuple[str, str, str] | None:
    """Return the first reason to refuse: (reason, key, nearest valid value)."""
    if replicas == 1:
        return NOBODY, "sync.method", "dense"
    if sharding in ("zero-2", "zero-3"):
        return WHOLE.format(sharding), "sharding", "zero-1"
    if island is not None:
        return ISLANDS, "island", "none"
    if device_kinds > 1 and sharding == "zero-0":
        # With sharded states, one rank steps each weight and sends it to the others.
        return UNEQUAL, "sharding", "zero-1"
    if precision in SCALED:
        return SCALE.format(precision), "precision", "bf16"
    return None


def device_kinds(cluster: Cluster) -> int:
    """Return the number of kinds of devices in a cluster."""
    return len({group.device.name for group in cluster.groups})


def _of_layout(job: Job, layout: Layout) -> str | None:
    if layout.sync != NAME:
        return None
    kinds = device_kinds(job.cluster)
    found = problem_of(layout.sharding, layout.island, job.precision, replicas_of(layout), kinds)
    return None if found is None else f"{NAME}: {found[0]}; nearest {found[1]}: {found[2]}"


def _of_plan(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    try:
        if options_of(plan) is None:
            return
    except InputError as error:
        yield from error.violations
        return
    replicas = min(len(stage.replicas) for stage in plan.stages)
    found = problem_of(plan.sharding, plan.island, plan.precision, replicas)
    if found is not None:
        yield Violation(f"plan: {found[1].removeprefix('sync.')}", f"{NAME}: {found[0]}", found[2])


RULES = (
    Composition(
        method=NAME,
        other="one replica, zero-2, zero-3, islands, unequal devices with zero-0, fp16",
        reason=f"{NOBODY}; {WHOLE.format('zero-2')}; {ISLANDS}; {UNEQUAL}; {SCALE.format('fp16')}",
        refuse=_of_layout,
    ),
    PlanRule(refuse=_of_plan),
)
