"""Laws of rolls: no member goes on with a dead one, whatever the order in which all learn of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from weft.run.launch.rolls import Replicas, Roll, RollCall, RollKeeper

RANKS = 4
SINGLE = Replicas(tuple((rank,) for rank in range(RANKS)), least=2)


class Memory:
    """A store in memory."""

    def __init__(self) -> None:
        self._found: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._found[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._found[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._found for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._found.pop(key, None) is not None


@pytest.fixture
def call() -> RollCall:
    return RollCall(Memory(), RANKS)


def keeper_of(call: RollCall, *, begun: bool = True, least: int = 2) -> RollKeeper:
    """A keeper of the first roll, whose members take its steps."""
    keeper = RollKeeper(call, SINGLE._replace(least=least))
    for rank in keeper.roll.members if begun else ():
        call.begin(keeper.roll, rank)
    return keeper


def test_a_killed_member_is_in_no_later_roll_until_a_new_process_waits(call: RollCall) -> None:
    keeper = keeper_of(call)
    assert keeper.lose([1], {1: -9}) is None
    assert call.at(1) == Roll(1, (0, 2, 3))
    assert keeper.replaces(1, -9)
    keeper.admit()
    assert call.at(2) is None
    call.wait_in(1)
    keeper.admit()
    assert call.at(2) is None, "the members have not left their roll"
    call.leave(keeper.roll)
    keeper.admit()
    assert call.at(2) == keeper.roll == Roll(2, (0, 1, 2, 3))
    assert call.waiting(SINGLE) == []


def test_a_replica_of_several_ranks_is_lost_and_comes_back_as_a_whole() -> None:
    replicas = Replicas(((0, 3), (1, 4), (2, 5)), least=2)
    assert Replicas.of_json(json.dumps(replicas)) == replicas
    call = RollCall(Memory(), 6)
    keeper = RollKeeper(call, replicas)
    for rank in range(6):
        call.begin(keeper.roll, rank)
    assert keeper.lose([4], {4: -9}) is None
    assert keeper.roll.members == (0, 2, 3, 5)
    call.wait_in(1)
    call.leave(keeper.roll)
    assert call.waiting(replicas) == []
    call.wait_in(4)
    keeper.admit()
    assert keeper.roll.members == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("killed", "exit_codes", "begun", "why"),
    [
        ([1], {1: 1}, True, ""),
        ([1, 2], {1: -9, 2: 2}, True, ""),
        ([1, 2, 3], {1: -9, 2: -9, 3: -6}, True, "fewer than 2 replicas are left"),
        ([1], {1: -9, 2: 0}, True, "other ranks have finished"),
        ([1], {1: -9}, False, "the ranks had not begun to step together"),
        ([1, 2], {1: -9, 2: -11}, True, None),
    ],
)
def test_a_run_ends_where_the_others_cannot_go_on(
    call: RollCall, killed: list[int], exit_codes: dict[int, int], begun: bool, why: str | None
) -> None:
    assert keeper_of(call, begun=begun).lose(killed, exit_codes) == why


def test_a_process_that_is_killed_again_and_again_is_not_replaced_for_ever(call: RollCall) -> None:
    keeper = keeper_of(call)
    keeper.lose([1], {1: -9})
    assert [keeper.replaces(1, -9) for _ in range(5)] == [True, True, True, False, False]
    assert not keeper_of(call).replaces(2, 1), "it refuses to start"
    # Whoever has joined in between may die as often again.
    call.wait_in(1)
    call.leave(keeper.roll)
    keeper.admit()
    assert keeper.replaces(1, -9)


def entering(call: RollCall, roll: Roll, rank: int, found: list[Roll | None]) -> Iterator[None]:
    """A member's way into a roll, one access to the store at a time; None: it goes on to a later one."""
    call.tell(roll, rank, {})
    yield
    while not call.all_told(roll):
        yield
        if call.at(roll.number + 1) is not None:
            found.append(None)
            return
    yield
    found.append(roll if call.at(roll.number + 1) is None else None)


@pytest.mark.parametrize("told", [False, True])
def test_in_any_order_the_run_ends_or_nobody_goes_on_with_a_dead_member(*, told: bool) -> None:
    """The agent writes the next roll and looks who has told, in all places between a member's accesses.

    `told`: the dead member had told, so that the other one finds all of them.
    """
    outcomes = set()
    for before, between in product(range(6), repeat=2):
        call = RollCall(Memory(), RANKS)
        keeper = keeper_of(call)
        keeper.lose([3], {3: -9})
        roll, went = keeper.roll, list[Roll | None]()
        for rank in (1, 2) if told else (2,):
            call.tell(roll, rank, {})
        way = entering(call, roll, 0, went)
        for _ in range(before):
            next(way, None)
        look = call.all_told

        def looked(roll: Roll, look: Any = look, way: Iterator[None] = way, between: int = between) -> bool:
            for _ in range(between):
                next(way, None)
            found: bool = look(roll)
            return found

        with patch.object(
            keeper, "_call", SimpleNamespace(write=call.write, all_told=looked, all_begun=call.all_begun)
        ):
            ended = keeper.lose([1], {1: -9})
        for _ in way:
            pass
        assert went[0] is None or ended is not None, "it opens groups with a dead member, and nobody ends it"
        outcomes.add((went[0] is None, ended is None))
    assert (True, True) in outcomes
    assert ((False, False) in outcomes) == told
