"""One move per schedule: the same gradients in another order of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.describe.contract import Contract
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import said_options
from weft.moves.edits import layout_move
from weft.moves.move import Edit, Move, Purpose
from weft.program.schedules import all_schedules
from weft.program.schedules.base import Schedule, contract_of, is_for_graphs, searched_options, takes_places

SOURCES = {
    "gpipe": "Huang et al., GPipe, arXiv 1811.06965",
    "1f1b": "Narayanan et al., PipeDream-Flush, arXiv 2006.09503",
    "graph-1f1b": "Jeon et al., GraphPipe, arXiv 2406.17145",
    "depth-first": "Narayanan et al., Megatron-LM, arXiv 2104.04473",
    "hybrid": "Lamy-Poirier et al., Fast-LLM",
    "zb-h1": "Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
    "graph-zb-h1": "weft, after Qi et al., arXiv 2401.10241, and Jeon et al., arXiv 2406.17145",
    "zb-v": "Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241",
    "chimera": "Li and Hoefler, Chimera, arXiv 2107.06925",
    "placed": "Jeon et al., Baechi, SoCC 2020",
    "placed-zb": "weft, after Jeon et al., Baechi, SoCC 2020, and Qi et al., arXiv 2401.10241",
    "breadth-first": "Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv 2211.05953",
}


def schedule_moves() -> tuple[Move, ...]:
    """Return a move for every registered schedule."""
    return tuple(_schedule_move(schedule) for schedule in all_schedules().values())


def schedules_within(contract: Contract) -> Sequence[Schedule]:
    """Return the registered schedules within a contract."""
    return [schedule for schedule in all_schedules().values() if contract_of(schedule) <= contract]


def _words(layout: Layout) -> str:
    return " ".join([layout.schedule, *said_options(layout.options)])


def _schedule_move(schedule: Schedule) -> Move:
    name = schedule.name

    def edits(job: Job, layout: Layout) -> Iterator[Edit]:
        unasked = takes_places(schedule) or (is_for_graphs(schedule) and job.graph.is_chain)
        if layout.stages == 1 or unasked:
            return
        for options in searched_options(schedule):
            other = replace(layout, schedule=name, options=options)
            if other != layout:
                yield Edit(f"{_words(layout)} -> {_words(other)}", other)

    return layout_move(
        f"schedule {name}",
        edits,
        Purpose.FASTER,
        otherwise=_otherwise(schedule),
        contract=contract_of(schedule),
        summary=(schedule.__doc__ or name).strip().splitlines()[0],
        source=SOURCES.get(name, "registered by an entry point"),
        verify="gradients equal one process (float64, 1e-9) for every (pp, dp) up to four ranks",
        asked_by=("plan.schedule", name),
    )


def _otherwise(schedule: Schedule) -> str:
    """Return the reason why the schedule makes no other plan."""
    chain = ", is of a model whose layers form a chain" if is_for_graphs(schedule) else ""
    return (
        f"the plan already runs {schedule.name}{chain}, or has one stage, whose micro-batches have no order"
    )
