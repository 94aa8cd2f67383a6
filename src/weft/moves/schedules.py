"""One move per schedule: the same gradients in another order of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.describe.contract import Contract
from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.moves.job import job_of
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.moves.layout_of_plan import layout_of
from weft.moves.move import Context, Move
from weft.program.schedules import all_schedules
from weft.program.schedules.base import Schedule, contract_of

SOURCES = {
    "gpipe": "Huang et al., GPipe, arXiv 1811.06965",
    "1f1b": "Narayanan et al., PipeDream-Flush, arXiv 2006.09503",
    "depth-first": "Narayanan et al., Megatron-LM, arXiv 2104.04473",
    "hybrid": "Lamy-Poirier et al., Fast-LLM",
    "zb-h1": "Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
    "zb-v": "Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
    "chimera": "Li and Hoefler, Chimera, arXiv 2107.06925",
    "breadth-first": "Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953",
}


def schedule_moves() -> tuple[Move, ...]:
    """A move for every registered schedule."""
    return tuple(_schedule_move(schedule) for schedule in all_schedules().values())


def schedules_within(contract: Contract) -> Sequence[Schedule]:
    """The registered schedules that keep at least so much."""
    return [schedule for schedule in all_schedules().values() if contract_of(schedule) <= contract]


def _schedule_move(schedule: Schedule) -> Move:
    name = schedule.name

    def edited(context: Context) -> Layout:
        layout = layout_of(context.plan)
        return replace(layout, schedule=name, options={})

    def applies(context: Context) -> str | None:
        if context.plan.schedule.name == name:
            return f"the plan already runs {name}"
        return refuse(job_of(context), edited(context))

    def apply(context: Context) -> Plan:
        job = job_of(context)
        return build_plan(job, edited(context), flops_per_layer(job))

    return Move(
        name=f"schedule {name}",
        contract=contract_of(schedule),
        summary=(schedule.__doc__ or name).strip().splitlines()[0],
        source=SOURCES.get(name, "registered by an entry point"),
        verify="gradients equal one process (float64, 1e-9) for every (pp, dp) up to four ranks",
        applies=applies,
        apply=apply,
        asked_by=("plan.schedule", name),
    )
