"""Kernels that hold a place on their device until the other ranks' kernels run: who waits for whom.

With a place for each queue of a rank, as `weft.run.rank_streams.require_queues` demands, a Program that the
verifier accepts always ends. With fewer places it may not.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from program.hazards import waited_for
from program.layouts import pipelines, sharded_program, training_program

from weft.predict.cost.memory import SHARDINGS
from weft.program.kinds import is_compute, is_send
from weft.program.program import Program
from weft.program.verify import verify
from weft.program.waits import events


def most_queues(program: Program) -> int:
    """The most queues of messages and collectives that a rank has."""
    communicates = ~is_compute(program.columns.kind)
    queues = defaultdict(set)
    for rank, queue in zip(
        program.columns.rank[communicates].tolist(), program.queue[communicates].tolist(), strict=True
    ):
        queues[rank].add(queue)
    return max(map(len, queues.values()), default=0)


def ends(program: Program, places: int, draw: random.Random) -> bool:
    """Whether all rows end, in a drawn order, if so many kernels of a rank may wait for others at once."""
    node, rank = events(program).tolist(), program.columns.rank.tolist()
    computes, sends = is_compute(program.columns.kind), is_send(program.columns.kind)
    # The two ends of a message run at the same time.
    before = {
        row: {one for one in rows if not (sends[one] and node[row] == one)}
        for row, rows in waited_for(program).items()
    }
    members: defaultdict[int, list[int]] = defaultdict(list)
    for row, one in enumerate(node):
        members[one].append(row)
    left, running = set(range(len(program))), set[int]()
    free = dict.fromkeys(rank, places)
    while left:
        ready = sorted(row for row in left - running if not before[row] & left)
        begun = [row for row in ready if computes[row] or free[rank[row]]]
        if not begun:
            return False
        row = draw.choice(begun)
        if computes[row]:
            left.discard(row)
            continue
        running.add(row)
        free[rank[row]] -= 1
        together = members[node[row]]
        if running.issuperset(together):
            for one in together:
                running.discard(one)
                left.discard(one)
                free[rank[one]] += 1
    return True


@given(pipelines(max_devices=3), st.sampled_from(SHARDINGS), st.integers(0, 2**32))
def test_a_place_for_each_queue_is_enough(
    case: tuple[str, int, int, tuple[int, ...], int], sharding: str, seed: int
) -> None:
    program = sharded_program(case, sharding)
    assume(not verify(program))
    assert ends(program, most_queues(program), random.Random(seed))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_fewer_places_may_not_be_enough(schedule: str) -> None:
    program = training_program(schedule, 2, 2, (4,))
    assert most_queues(program) == 2
    for places, always in ((1, False), (2, True)):
        assert all(ends(program, places, random.Random(seed)) for seed in range(20)) == always
