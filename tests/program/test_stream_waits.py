"""Waits between the streams of a rank: they give all orders of the edges, and each is needed for that."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import pipelines, sharded_program, training_program
from program.rank_parts import parts

from weft.describe.plan import Sharding
from weft.methods.sharding.kinds import GATHER
from weft.predict.cost.memory import SHARDINGS
from weft.program.kinds import FORWARD, is_compute
from weft.program.program import Columns, Edges
from weft.program.rank_program import RankProgram, part_of
from weft.program.stream_waits import edges_between, stream_of, stream_waits

CYCLES = 3


def orders(part: RankProgram, waits: Edges) -> list[int]:
    """By row of three cycles, the set of rows that end before it starts, as the bits of a number."""
    stream, computes = stream_of(part.columns).tolist(), is_compute(part.columns.kind).tolist()
    rows, before = len(part), list[int]()
    into: dict[int, list[tuple[int, int]]] = {}
    for source, target, distance in zip(*(one.tolist() for one in astuple(waits)), strict=True):
        into.setdefault(target, []).append((source, distance))
    last: dict[int, int] = {}
    computed: int | None = None
    for row in range(CYCLES * rows):
        own = stream[row % rows]
        follows = [last[own]] if own in last else []
        if computed is not None and not computes[row % rows]:
            follows.append(computed)
        waited = ((row // rows - distance, source) for source, distance in into.get(row % rows, []))
        follows += [source + rows * cycle for cycle, source in waited if cycle >= 0]
        before.append(0)
        for one in follows:
            before[row] |= before[one] | 1 << one
        last[own] = row
        if computes[row % rows]:
            computed = row
    return before


def assert_laws(part: RankProgram) -> None:
    full, waits = edges_between(part, stream_of(part.columns)), stream_waits(part)
    assert orders(part, waits) == orders(part, full)
    for one in range(len(waits)):
        rest = waits.take(np.arange(len(waits)) != one)
        source, target = int(waits.source[one]), int(waits.target[one])
        found = orders(part, rest)[target + (CYCLES - 1) * len(part)]
        assert not found >> source + (CYCLES - 1 - int(waits.distance[one])) * len(part) & 1


@given(parts())
def test_waits_between_any_streams_give_all_orders_and_each_is_needed(part: RankProgram) -> None:
    assert_laws(part)


@given(pipelines(max_devices=3), st.sampled_from(SHARDINGS), st.data())
def test_waits_of_all_schedules_give_all_orders_and_each_is_needed(
    case: tuple[str, int, int, tuple[int, ...], int], sharding: Sharding, data: st.DataObject
) -> None:
    program = sharded_program(case, sharding)
    part = part_of(program, data.draw(st.integers(0, program.ranks - 1)))
    assert_laws(part)
    # Edges to other ranks are messages and collectives, and need no wait here.
    assert len(stream_waits(part)) <= len(part.edges)


def test_an_edge_of_two_steps_needs_no_wait() -> None:
    """Before a step begins, the work of the step before the last one has ended."""
    whole = part_of(training_program("gpipe", 1, 1, (1,), 1), 0)
    columns = Columns.of(2, kind=[GATHER, FORWARD], peer=-1)
    for distance in (0, 1, 2):
        part = replace(whole, columns=columns, edges=Edges.of([0], [1], distance), first_row=0)
        assert len(stream_waits(part)) == (distance < 2)


def test_what_the_host_issued_computations_before_needs_no_wait() -> None:
    """1F1B between two neighbours: receives are waited for, and sends follow the computations."""
    part = part_of(training_program("1f1b", 3, 3, (4,), 1), 1)
    waits = stream_waits(part)
    kinds = part.columns.kind
    assert len(waits) == 8
    assert is_compute(kinds[waits.target]).all()
    assert not is_compute(kinds[waits.source]).any()
