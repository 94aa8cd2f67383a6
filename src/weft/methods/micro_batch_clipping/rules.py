"""The rules of micro-batch clipping: orders that make whole gradients, and parts of clipped micro-batches.

Clipping belongs to the job: plans whose micro-batches are no parts of a clipped one are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import DENSE, Layout
from weft.describe.layout_text import counts_text
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanRule
from weft.errors import InputError, Violation
from weft.methods.micro_batch_clipping.options import NAME, TABLE_NAME, ClipTable, options_of, read_options
from weft.methods.micro_batch_clipping.program import TURNS
from weft.moves.composition import Composition, FixedCut
from weft.moves.layout import shares_of
from weft.program.buffers import SHARDED_BUFFERS

# Orders in which a stage makes gradients of micro-batches one after the other, with one copy of the weights.
_ORDERS = (
    *("1f1b", "graph-1f1b", "gpipe", "depth-first", "breadth-first", "hybrid"),
    *("zb-h1", "graph-zb-h1", "zb-v"),
)
_METHOD = "micro-batch clipping"
_OTHERS = "replicas add up clipped gradients before they step"


def _problem(
    table: ClipTable,
    *,
    schedule: str,
    sharding: str,
    stages: int,
    devices: int,
    size: int,
    shares: Sequence[int],
    cut: Sequence[int] | None,
) -> Violation | None:
    """Return why a layout or a plan cannot clip micro-batches as the job asks, or None."""
    if schedule not in _ORDERS:
        problem = f"{schedule} is not one of {', '.join(_ORDERS)}, in which gradients are taken in turn"
        return Violation("schedule", problem, "1f1b")
    if sharding in ("zero-2", "zero-3") and stages > SHARDED_BUFFERS * devices:
        return Violation("sharding", f"{sharding}: {TURNS}", "zero-1")
    if table.by_stage and tuple(cut or ()) != table.layers_per_stage:
        found = "a balanced cut" if cut is None else f"stages of {counts_text(cut)} layers"
        problem = f"{found}: norms are of stages of {counts_text(table.layers_per_stage)} layers"
        return Violation("layers_per_stage", problem, str(list(table.layers_per_stage)))
    if table.samples % size:
        problem = f"micro-batches of {size} samples are no parts of clipped ones of {table.samples}"
        return Violation("micro_batch_size", problem, str(table.samples))
    if len(set(shares)) > 1:
        problem = "replicas with unlike shares of the batch clip unlike numbers of micro-batches"
        return Violation("micro_batches_per_replica", problem, "leave it out")
    together = table.samples // size
    odd = [share for share in shares if share % together]
    if odd:
        problem = f"{odd[0]} micro-batches of a replica are no whole groups of {together}, which are clipped"
        return Violation("micro_batches_per_replica", problem, f"a multiple of {together}")
    return None


def _asked(job: Job) -> ClipTable | None:
    chosen = job.method(NAME)
    return None if chosen is None else read_options(chosen)


def _cut(job: Job) -> tuple[int, ...] | None:
    table = _asked(job)
    return table.layers_per_stage if table is not None and table.by_stage else None


def _of_layout(job: Job, layout: Layout) -> str | None:
    table = _asked(job)
    if table is None:
        return None
    found = _problem(
        table,
        schedule=layout.schedule,
        sharding=layout.sharding,
        stages=layout.stages,
        devices=layout.pp,
        size=layout.micro_batch_size,
        shares=shares_of(job, layout),
        cut=(len(job.graph.layers),) if layout.stages == 1 else layout.layers_per_stage,
    )
    if found is None:
        return None
    return f"{TABLE_NAME}: {found.where}: {found.problem}; nearest {found.where}: {found.nearest}"


def _tied(job: Job, layout: Layout) -> str | None:
    if _asked(job) is None or layout.stages == 1 or not job.graph.tied:
        return None
    return f"{TABLE_NAME}: stages that share a weight see parts of its gradient; nearest pp: 1"


def _others(job: Job, layout: Layout) -> str | None:
    if _asked(job) is None or layout.sync == DENSE:
        return None
    return f"{TABLE_NAME}: {_OTHERS}, and not under sync {layout.sync}; nearest sync: {DENSE}"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Yield the problems of a plan that was edited by hand."""
    try:
        table = options_of(plan)
    except InputError as error:
        yield from error.violations
        return
    if table is None:
        return
    if plan.sync != Choice(name=DENSE):
        yield Violation("plan: sync", f"{NAME}: {_OTHERS}", DENSE)
    found = _problem(
        table,
        schedule=plan.schedule.name,
        sharding=plan.sharding,
        stages=len(plan.stages),
        devices=plan.pp,
        size=plan.micro_batch_size,
        shares=[replica.micro_batches for replica in plan.stages[0].replicas],
        cut=[len(stage.layers) for stage in plan.stages],
    )
    if found is not None:
        yield Violation(f"plan: {found.where}", found.problem, found.nearest)


RULES = (
    Composition(
        method=_METHOD,
        other="orders and micro-batches",
        reason="gradients are whole",
        refuse=_of_layout,
    ),
    Composition(method=_METHOD, other="tied weights of stages", reason="parts have no norm", refuse=_tied),
    Composition(method=_METHOD, other="other synchronisation", reason=_OTHERS, refuse=_others),
    FixedCut(layers_per_stage=_cut),
    PlanRule(refuse=_problems_of),
)
