"""Programs in plain text: the full table (`program.txt`) and a compact picture of the compute order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from weft.program.kinds import KINDS
from weft.program.program import NONE, Ints, Program
from weft.program.schedules.base import ComputeOrder

_HEADING = "position  id                kind               stage micro-batch   peer        bytes  after"


def format_program(program: Program, max_rows: int | None = None) -> str:
    """One line per instruction, rank by rank, in the order in which the host issues them.

    `after` lists the positions of the instructions that must have ended, with ``-n`` for those of n cycles
    earlier. The peer of a collective is its group, as ``g0``. A program of more than `max_rows` instructions
    is cut to an equal share for each rank, and what is left out is counted.
    """
    share = len(program)
    if max_rows is not None and len(program) > max_rows:
        share = max(1, max_rows // program.ranks)
    order = np.argsort(program.edges.target, kind="stable")
    first_edge = np.searchsorted(program.edges.target[order], np.arange(len(program) + 1))
    lines = [_summary(program), *_group_lines(program)]
    for rank in range(program.ranks):
        start, end = program.rank_starts[rank : rank + 2].tolist()
        lines += ["", f"rank {rank}: {end - start} instructions", _HEADING]
        shown = min(end, start + share)
        lines += [
            _line(program, row, order[first_edge[row] : first_edge[row + 1]]) for row in range(start, shown)
        ]
        if shown < end:
            lines.append(f"{'...':>8}  {end - shown} more instructions")
    return "\n".join(lines) + "\n"


def _summary(program: Program) -> str:
    facts = [f"purpose {program.obligations.purpose}", f"ranks {program.ranks}"]
    facts += [f"steps per cycle {program.steps_per_cycle}", f"instructions {len(program)}"]
    facts += [f"{key} {value}" for key, value in sorted(_methods(program).items())]
    return "program: " + ", ".join(facts)


def _methods(program: Program) -> dict[str, str]:
    """The schedule, what was folded, and what is owed to methods."""
    kept = {"folded": program.kept_replica, "folded_lanes": program.kept_lane}
    facts = {key: str(value) for key, value in kept.items() if value is not None}
    if program.schedule:
        facts["schedule"] = program.schedule
    for owed in program.obligations.methods.values():
        facts |= owed.facts
    return facts


def _group_lines(program: Program) -> list[str]:
    return [f"group g{index}: ranks {list(group)}" for index, group in enumerate(program.groups)]


def _line(program: Program, row: int, incoming: Ints) -> str:
    instruction = program.instruction(row)
    peer = _or_dash(instruction.peer) if instruction.group == NONE else f"g{instruction.group}"
    edges = program.edges
    after = " ".join(
        f"{source}-{distance}" if distance else str(source)
        for source, distance in zip(
            edges.source[incoming].tolist(), edges.distance[incoming].tolist(), strict=True
        )
    )
    # In a cycle of several steps, which of them.
    of_step = f" of step {instruction.iteration}" if program.steps_per_cycle > 1 else ""
    kind = instruction.kind.name + of_step
    text = (
        f"{row:>8}  {instruction.id:016x}  {kind:<18} {_or_dash(instruction.stage):>5} "
        f"{_or_dash(instruction.micro_batch):>11} {peer:>6} {instruction.bytes or '-':>12}  {after}"
    )
    return text.rstrip()


def _or_dash(value: int) -> str:
    return "-" if value == NONE else str(value)


def compute_orders(program: Program, kinds: Sequence[int] | None = None) -> list[ComputeOrder]:
    """What each rank computes, in order; micro-batches keep their numbers in the global batch.

    `kinds` takes instructions of these kinds only; all of the compute stream when not given.
    """
    if kinds is None:
        kinds = [code for code, kind in enumerate(KINDS) if kind.stream == "compute"]
    columns, wanted = program.columns, np.isin(program.columns.kind, kinds)
    rows = [
        np.flatnonzero(wanted[start:end]) + start for start, end in pairwise(program.rank_starts.tolist())
    ]
    return [ComputeOrder(columns.kind[mine], columns.stage[mine], columns.micro_batch[mine]) for mine in rows]


def format_grid(orders: Program | Sequence[ComputeOrder]) -> str:
    """The compute order by rank: one line per rank, one cell per instruction, such as ``F0.3`` and ``B2.3``.

    Columns count instructions, not time.
    """
    if isinstance(orders, Program):
        orders = compute_orders(orders)
    rows = [
        [
            KINDS[kind].symbol + str(stage) + ("" if micro_batch == NONE else f".{micro_batch}")
            for kind, stage, micro_batch in zip(
                order.kind.tolist(), order.stage.tolist(), order.micro_batch.tolist(), strict=True
            )
        ]
        for order in orders
    ]
    width = max((len(cell) for cells in rows for cell in cells), default=0)
    label = len(str(max(len(rows) - 1, 0)))
    return "\n".join(
        f"rank {rank:>{label}} | " + " ".join(cell.ljust(width) for cell in cells).rstrip()
        for rank, cells in enumerate(rows)
    )
