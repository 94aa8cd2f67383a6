"""What may go wrong with the values of a program, found one use at a time: an oracle for the verifier.

It asks less: any chain of edges and queues orders two instructions here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter

import numpy as np

from weft.program.kinds import KINDS
from weft.program.program import Program
from weft.program.values import VALUES, Use

Place = tuple[object, ...]


def hazards(program: Program) -> set[str]:
    """Names of the values that an instruction may find unmade, half made, gone or left over in one cycle.

    Raises:
        graphlib.CycleError: for a program that waits for itself.
    """
    earlier = _earlier(program)
    found = set()
    for name, places in _uses(program).items():
        value = VALUES[name]
        for uses in places.values():
            if not value.carried and _goes_wrong(uses, earlier, accumulates=value.accumulates):
                found.add(name)
            reads = any(what == "read" for what, _ in uses)
            if not value.carried and value.until == "read" and not reads:
                found.add(name)
            if value.until == "freed" and uses[-1][0] == "write":
                found.add(name)
    return found


def _goes_wrong(uses: list[tuple[str, int]], earlier: list[int], *, accumulates: bool) -> bool:
    """Whether a read may miss what makes its value, or find it gone."""
    writes: list[int] = []
    reads: list[int] = []
    for what, row in uses:
        if what == "write":
            if (writes and not accumulates) or reads:
                return True
            writes.append(row)
            continue
        if not writes or any(not earlier[row] >> write & 1 for write in writes):
            return True
        if what == "consume":
            if any(not earlier[row] >> read & 1 for read in reads):
                return True
            writes, reads = [], []
        else:
            reads.append(row)
    return False


def waited_for(program: Program) -> dict[int, set[int]]:
    """For each row the one before it in its queue, and those that its edges of the same cycle come from."""
    before: dict[int, set[int]] = {row: set() for row in range(len(program))}
    edges = program.edges
    for source, target, distance in zip(edges.source, edges.target, edges.distance, strict=True):
        if distance == 0:
            before[int(target)].add(int(source))
    last: dict[int, int] = {}
    for row, queue in enumerate(program.queue.tolist()):
        if queue in last:
            before[row].add(last[queue])
        last[queue] = row
    return before


def _earlier(program: Program) -> list[int]:
    """For each row the rows that have ended before it starts, as bits."""
    before = waited_for(program)
    found = [0] * len(program)
    for row in TopologicalSorter(before).static_order():
        for other in before[row]:
            found[row] |= found[other] | 1 << other
    return found


def _uses(program: Program) -> dict[str, dict[Place, list[tuple[str, int]]]]:
    """By value and place ("write", "read" or "consume", row) in order, other ranks after the place's own."""
    found: dict[str, dict[Place, list[tuple[str, int]]]] = defaultdict(lambda: defaultdict(list))
    made: set[tuple[str, Place]] = set()
    away: list[tuple[str, Place, str, int]] = []
    rows = [(row, KINDS[int(code)]) for row, code in enumerate(program.columns.kind)]
    for row, kind in rows:
        made |= {(use.value, place) for use in kind.all_writes for place in _places(program, use, row)}
    for row, kind in rows:
        rank = int(program.columns.rank[row])
        for read in kind.all_reads:
            choices = [list(_places(program, choice, row)) for choice in read.choices]
            for places in zip(*choices, strict=True):
                pairs = list(zip(read.choices, places, strict=True))
                choice, place = next((pair for pair in pairs if (pair[0].value, pair[1]) in made), pairs[-1])
                what = "consume" if choice.consumes else "read"
                if place[0] == rank:
                    found[choice.value][place].append((what, row))
                else:
                    away.append((choice.value, place, what, row))
        for use in kind.all_writes:
            for place in _places(program, use, row):
                found[use.value][place].append(("write", row))
    for name, place, what, row in away:
        found[name][place].append((what, row))
    return found


def _places(program: Program, use: Use, row: int) -> Iterator[Place]:
    """The coordinates at which one row uses a value: the rank, then the others."""
    places = use.at(program, np.array([row], dtype=np.int64))
    for index in range(len(places.rows)):
        yield tuple(
            int(places.moved[name][index] if name in places.moved else getattr(program.columns, name)[row])
            for name in ("rank", *VALUES[use.value].scope, "iteration")
        )
