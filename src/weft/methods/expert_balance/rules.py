"""The rules of expert balance: orders that know a step's counts in time, and micro-batches of the job.

A balance belongs to the job, so plans that would count other tokens are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import DENSE, Layout
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanRule, listed
from weft.describe.synchronisation import keeps_gradients_local
from weft.errors import InputError, Violation
from weft.methods.expert_balance.coverage import coverage
from weft.methods.expert_balance.options import (
    BY_INDEX,
    NAME,
    TABLE_NAME,
    ExpertsTable,
    options_of,
    read_options,
)
from weft.moves.composition import Composition, ForwardFirst
from weft.moves.layout import pipeline_of, shares_of
from weft.program.schedules import get_schedule
from weft.program.schedules.base import paths_of

# Orders in which every stage runs all its forward passes before its first backward pass.
FORWARD_FIRST = ("breadth-first", "gpipe")
_METHOD = "expert balance"
_WHOLE = "a capacity counts the tokens of whole samples, which context ranks divide"
_APART = "replicas step by themselves, and would be balanced together"


class _Counting(NamedTuple):
    """The decisions of a layout or a plan on which a balance depends.

    Attributes:
        sizes: samples of one rank's pass, of each stage.
        shares: micro-batches of each replica.
    """

    schedule: str
    micro_batch_size: int
    sizes: tuple[int, ...]
    shares: tuple[int, ...]


def _problem(table: ExpertsTable, decided: _Counting) -> Violation | None:
    """Return why a layout or a plan would balance other tokens than the job asks, or None."""
    late = decided.schedule not in FORWARD_FIRST and max(decided.shares) > 1
    if late and table.balance == "global-batch":
        problem = f"{decided.schedule} goes back before a stage has counted all micro-batches of a step"
        near = f"{' or '.join(FORWARD_FIRST)}, or {TABLE_NAME}.balance: buffer"
        return Violation("schedule", problem, near)
    odd = sorted({size for size in decided.sizes if size % table.group_samples})
    if odd and table.local_weight > 0:
        problem = f"ranks run {listed(odd)} samples at once, and the balance counts {table.samples} together"
        return Violation("micro_batch_size", problem, f"a multiple of {table.samples} on each rank")
    return _other_index(table, decided) if table.balance in BY_INDEX else None


def _other_index(table: ExpertsTable, decided: _Counting) -> Violation | None:
    kind = f"balance {table.balance}"
    if decided.micro_batch_size != table.samples:
        problem = f"{decided.micro_batch_size}; {kind} is of micro-batches of {table.samples} samples"
        return Violation("micro_batch_size", problem, str(table.samples))
    if len(decided.shares) != table.replicas:
        problem = f"{len(decided.shares)} replicas; {kind} is of {table.replicas}"
        return Violation("dp", problem, str(table.replicas))
    if len(set(decided.shares)) > 1:
        return Violation(
            "micro_batches_per_replica", f"{kind} needs equal shares of replicas", "equal shares"
        )
    return None


def _asked(job: Job) -> ExpertsTable | None:
    chosen = job.method(NAME)
    return None if chosen is None else read_options(chosen)


def _of_layout(job: Job, layout: Layout) -> str | None:
    table = _asked(job)
    if table is None:
        return None
    sizes = tuple(layout.micro_batch_size // parts // layout.ep for parts in layout.splits or (1,))
    paths = paths_of(get_schedule(layout.schedule))
    shares = tuple(share // paths for share in shares_of(job, layout) for _ in range(paths))
    decided = _Counting(layout.schedule, layout.micro_batch_size, sizes, shares)
    found = _problem(table, decided)
    if found is None:
        return None
    known = _known_in_time(job, layout) if found.where == "schedule" else ""
    return f"{found.where}: {found.problem}{known}; nearest {found.where}: {found.nearest}"


def _known_in_time(job: Job, layout: Layout) -> str:
    """Return which part of a step an early order has counted in time, in words."""
    schedule, pipeline = get_schedule(layout.schedule), pipeline_of(job, layout)
    if schedule.refuse(pipeline, layout.options) is not None:
        return ""
    shares = coverage(schedule, pipeline, layout.options)
    return f", the first time after {shares.min():.0%} of them, in the mean after {shares.mean():.0%}"


def _divided(job: Job, layout: Layout) -> str | None:
    table = _asked(job)
    if table is None or table.capacity is None or layout.cp == 1:
        return None
    return f"{TABLE_NAME}.capacity: {_WHOLE}; nearest cp: 1"


def _apart(job: Job, layout: Layout) -> str | None:
    if _asked(job) is None or not keeps_gradients_local(Choice(name=layout.sync)):
        return None
    return f"{TABLE_NAME}.balance: {_APART}; nearest sync: {DENSE}"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Yield the problems of a plan that was edited by hand."""
    try:
        table = options_of(plan)
    except InputError as error:
        yield from error.violations
        return
    if table is None:
        return
    if plan.cp > 1 and table.capacity is not None:
        yield Violation("plan: mesh.cp", f"{NAME}: {_WHOLE}", "1")
    if keeps_gradients_local(plan.sync):
        yield Violation("plan: sync", f"{NAME}: {_APART}", DENSE)
    sizes = tuple(plan.size_of(stage) // plan.ep for stage in range(len(plan.stages)))
    shares = tuple(replica.micro_batches for replica in plan.stages[0].replicas)
    found = _problem(table, _Counting(plan.schedule.name, plan.micro_batch_size, sizes, shares))
    if found is not None:
        yield Violation(f"plan: {found.where}", found.problem, found.nearest)


def _goes_forward_first(job: Job) -> bool:
    table = _asked(job)
    return table is not None and table.balance == "global-batch"


RULES = (
    ForwardFirst(asks=_goes_forward_first),
    Composition(
        method=_METHOD,
        other="orders and micro-batches",
        reason="the tokens that are counted together belong to the job",
        refuse=_of_layout,
    ),
    Composition(method=_METHOD, other="replicas that step by themselves", reason=_APART, refuse=_apart),
    Composition(method=_METHOD, other="context ranks, with a capacity", reason=_WHOLE, refuse=_divided),
    PlanRule(refuse=_problems_of),
)
