"""Programs in plain text: the table of `program.txt`."""

from __future__ import annotations

import numpy as np

from weft.program.arrays import Ints
from weft.program.program import NONE, Program

_HEADING = "position  id                kind               stage micro-batch   peer        bytes  after"


def format_program(program: Program, max_rows: int | None = None) -> str:
    """Return one line per instruction, rank by rank, in the order in which the host issues them.

    `after` lists the positions of the instructions that must have ended, with ``-n`` for n cycles earlier.
    The peer of a collective is its group, as ``g0``. A program of more than `max_rows` instructions is cut to
    an equal share for each rank. Each rank's omitted instructions are counted.
    """
    share = len(program)
    if max_rows is not None and len(program) > max_rows:
        share = max(1, max_rows // program.ranks)
    order = np.argsort(program.edges.target, kind="stable")
    first_edge = np.searchsorted(program.edges.target[order], np.arange(len(program) + 1))
    groups = (f"group g{index}: ranks {list(group)}" for index, group in enumerate(program.groups))
    lines = [_summary(program), *groups]
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
    """Return the folded replica and lane, the schedule, and the facts of the obligations to methods."""
    kept = {"folded": program.kept_replica, "folded_lanes": program.kept_lane}
    facts = {key: str(value) for key, value in kept.items() if value is not None}
    if program.schedule:
        facts["schedule"] = program.schedule
    for owed in program.obligations.methods.values():
        facts |= owed.facts
    return facts


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
    # The step, in a cycle of several steps.
    of_step = f" of step {instruction.iteration}" if program.steps_per_cycle > 1 else ""
    kind = instruction.kind.name + of_step
    text = (
        f"{row:>8}  {instruction.id:016x}  {kind:<18} {_or_dash(instruction.stage):>5} "
        f"{_or_dash(instruction.micro_batch):>11} {peer:>6} {instruction.bytes or '-':>12}  {after}"
    )
    return text.rstrip()


def _or_dash(value: int) -> str:
    return "-" if value == NONE else str(value)
