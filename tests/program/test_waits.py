"""Whoever is stuck is named, whatever the schedule, the layout and the size of messages."""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program.layouts import pipelines, sharded_program, training_program
from program.rendezvous import ended_together, stuck_rows

from weft.describe.plan import Sharding
from weft.methods.sharding.kinds import REDUCE
from weft.program.kinds import FORWARD, MESSAGES, is_any_of, is_compute
from weft.program.program import Program
from weft.program.waits import standstill

RECEIVES = [receive for _, receive in MESSAGES]


def ended_without(program: Program, stuck: int, *, eager: bool) -> npt.NDArray[np.bool_]:
    """What has ended when one instruction never does and nothing else gets on."""
    ended = np.ones(len(program), dtype=np.bool_)
    ended[list(stuck_rows(program, never={stuck}, eager=eager))] = False
    return ended


@settings(max_examples=120)
@given(case=pipelines(), sharding=st.sampled_from(get_args(Sharding)), eager=st.booleans(), data=st.data())
def test_any_single_stuck_instruction_is_named(
    case: tuple[str, int, int, tuple[int, ...], int], sharding: Sharding, eager: bool, data: st.DataObject
) -> None:
    program = sharded_program(case, sharding)
    stuck = data.draw(st.integers(0, len(program) - 1))
    ended = ended_without(program, stuck, eager=eager)
    found = standstill(program, ended)
    columns = program.columns
    rank = int(columns.rank[stuck])
    assert rank in found.holding
    # Of what several do together, nobody can tell who has come to it.
    together = ended_together(program)[stuck]
    others = {found.at[holder] for holder in found.holding if holder != rank}
    assert others <= together
    if is_compute(columns.kind)[stuck]:
        assert found.holding == (rank,)
        assert found.at[rank] == stuck
    elif not eager or columns.kind[stuck] not in RECEIVES:
        # A receive whose message has been sent is not told from the computation that reads it.
        assert found.at[rank] == stuck
    left = set(columns.rank[~ended].tolist())
    assert set(found.at) <= left


@given(case=pipelines(), data=st.data())
def test_a_message_that_nobody_has_read_yet_holds_nobody_up(
    case: tuple[str, int, int, tuple[int, ...], int], data: st.DataObject
) -> None:
    program = training_program(*case)
    computes = np.flatnonzero(is_compute(program.columns.kind))
    stuck = int(data.draw(st.sampled_from(computes.tolist())))
    ended = ended_without(program, stuck, eager=True)
    arrived = np.flatnonzero(ended & is_any_of(program.columns.kind, RECEIVES))
    unread = data.draw(st.sets(st.sampled_from(arrived.tolist()))) if len(arrived) else set()
    # A receiver records a small message when it needs it, so that its reader has not ended either.
    readers = {target for source, target in _edges(program) if source in unread and ended[target]}
    unread -= {source for source, target in _edges(program) if target in readers}
    ended[list(unread)] = False
    found = standstill(program, ended)
    assert found.holding == (int(program.columns.rank[stuck]),)
    assert found.at[found.holding[0]] == stuck


@given(case=pipelines(), data=st.data())
def test_a_rank_that_has_not_begun_holds_up_all_that_wait_for_it(
    case: tuple[str, int, int, tuple[int, ...], int], data: st.DataObject
) -> None:
    program = training_program(*case)
    absent = data.draw(st.integers(0, program.ranks - 1))
    mine = set(np.flatnonzero(program.columns.rank == absent).tolist())
    ended = np.ones(len(program), dtype=np.bool_)
    ended[list(stuck_rows(program, never=mine))] = False
    found = standstill(program, ended, absent=[absent])
    assert found.holding == (absent,)


def test_ranks_wait_for_the_one_that_is_stuck_in_its_forward_pass() -> None:
    program = training_program("1f1b", 3, 3, (4,))
    columns = program.columns
    (stuck,) = np.flatnonzero(
        (columns.kind == FORWARD) & (columns.stage == 1) & (columns.micro_batch == 2)
    ).tolist()
    found = standstill(program, ended_without(program, stuck, eager=True))
    assert found.holding == (1,)
    assert found.at[1] == stuck
    assert sorted(found.at) == [0, 1, 2]


def test_members_of_a_collective_that_does_not_end_are_all_named() -> None:
    program = training_program("gpipe", 1, 1, (2, 2))
    reduces = np.flatnonzero(program.columns.kind == REDUCE)
    assert len(reduces) == 2
    found = standstill(program, ended_without(program, int(reduces[0]), eager=True))
    assert found.holding == (0, 1)
    assert [found.at[rank] for rank in (0, 1)] == reduces.tolist()


def test_a_step_that_has_ended_holds_nobody_up() -> None:
    program = training_program("gpipe", 2, 2, (2,))
    found = standstill(program, np.ones(len(program), dtype=np.bool_))
    assert (found.at, found.holding) == ({}, ())


def _edges(program: Program) -> list[tuple[int, int]]:
    now = program.edges.distance == 0
    return list(zip(program.edges.source[now].tolist(), program.edges.target[now].tolist(), strict=True))


@pytest.mark.parametrize("eager", [False, True])
def test_the_oracle_ends_every_program_in_which_nothing_is_stuck(eager: bool) -> None:
    assert not stuck_rows(training_program("1f1b", 4, 4, (6,)), eager=eager)
