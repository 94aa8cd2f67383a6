"""Rolls: the ranks of a local run that are present, where processes may be killed and replaced.

Roll 0 has all ranks. The agent, which sees its processes end, alone writes the later ones, each into the
job's store. A roll without a killed member's replica follows as soon as the agent notices. A roll with new
processes follows when the members have left the one before, between two steps. This module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

# Set for processes that take the place of others.
REPLACES = "WEFT_REPLACES"
# A new process that is killed before it has joined is replaced so often.
_ATTEMPTS = 3


class Store(Protocol):
    """The part of torch's stores that rolls use."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> bool: ...


class Replicas(NamedTuple):
    """The ranks of each replica of a run, and the fewest replicas that go on without the others."""

    ranks: tuple[tuple[int, ...], ...]
    least: int

    @classmethod
    def of_json(cls, text: str) -> Replicas:
        ranks, least = json.loads(text)
        return cls(tuple(map(tuple, ranks)), least)

    def among(self, ranks: Collection[int]) -> list[tuple[int, ...]]:
        """Return the replicas that have all their ranks among these."""
        return [one for one in self.ranks if set(one) <= set(ranks)]


class Roll(NamedTuple):
    """The members of a roll: ranks of the run, in order."""

    number: int
    members: tuple[int, ...]


class RollCall:
    """The store's record of rolls, as all processes of a run see it."""

    def __init__(self, store: Store, ranks: int) -> None:
        self._store = store
        self._first = Roll(0, tuple(range(ranks)))

    def at(self, number: int) -> Roll | None:
        """Return a roll; None if it is not written yet."""
        if number == 0:
            return self._first
        key = _key("roll", number)
        return Roll(number, tuple(json.loads(self._store.get(key)))) if self._store.check([key]) else None

    def write(self, roll: Roll) -> None:
        self._store.set(_key("roll", roll.number), json.dumps(roll.members))

    def begin(self, roll: Roll, rank: int) -> None:
        """Note that a rank takes the steps of a roll, so that it can lose another member."""
        self._store.set(_key("begun", roll.number, rank), "")

    def all_begun(self, roll: Roll) -> bool:
        return self._store.check([_key("begun", roll.number, rank) for rank in roll.members])

    def leave(self, roll: Roll) -> None:
        """Note that the members have left a roll between two steps, to take in new processes."""
        self._store.set(_key("left", roll.number), "")

    def is_left(self, roll: Roll) -> bool:
        return self._store.check([_key("left", roll.number)])

    def wait_in(self, rank: int) -> None:
        """Note that the process of a rank can join."""
        self._store.set(_key("waiting", rank), "")

    def waiting(self, replicas: Replicas) -> list[tuple[int, ...]]:
        """Return the replicas of which all processes wait to join."""
        return [one for one in replicas.ranks if self._store.check([_key("waiting", rank) for rank in one])]

    def forget(self, rank: int) -> None:
        """Note that the process of a rank waits no more: it has joined, or was killed."""
        self._store.delete_key(_key("waiting", rank))

    def tell(self, roll: Roll, rank: int, told: object) -> None:
        """Leave a value in JSON for the other members of a roll."""
        self._store.set(_key("told", roll.number, rank), json.dumps(told))

    def all_told(self, roll: Roll) -> bool:
        """Return True if all members have left their values; those of the first roll have none to leave."""
        return roll == self._first or self._store.check(self._keys(roll))

    def told(self, roll: Roll) -> list[Any]:
        """Return the values of all members of a roll, in order, when all are there."""
        return [json.loads(self._store.get(key)) for key in self._keys(roll)]

    def _keys(self, roll: Roll) -> list[str]:
        return [_key("told", roll.number, rank) for rank in roll.members]


def _key(*parts: str | int) -> str:
    """Return a key of the record; the job's store has other keys, too."""
    return "/".join(map(str, ("rolls", *parts)))


class RollKeeper:
    """The agent's part: it decides who is present.

    Attributes:
        roll: the newest one.
    """

    def __init__(self, call: RollCall, replicas: Replicas) -> None:
        self._call, self._replicas = call, replicas
        self.roll = Roll(0, tuple(sorted(rank for one in replicas.ranks for rank in one)))
        self._attempts = dict.fromkeys(self.roll.members, 0)

    def is_member(self, rank: int) -> bool:
        return rank in self.roll.members

    def lose(self, killed: Collection[int], exit_codes: Mapping[int, int]) -> str | None:
        """Write the roll without the replicas of killed members; return why the run ends instead, if it does.

        Args:
            exit_codes: those of the ended ranks, negative for a signal. Of a rank that has failed by itself,
                its own error is the reason, and this one is empty.
        """
        former = self.roll
        if any(exit_codes[rank] >= 0 for rank in killed):
            return ""
        replicas = self._replicas.among(set(former.members) - set(killed))
        if len(replicas) < self._replicas.least:
            return f"fewer than {self._replicas.least} replicas are left"
        left = [rank for one in replicas for rank in one]
        if any(exit_codes.get(one) == 0 for one in left):
            return "other ranks have finished"
        self._write(left)
        # Members look for a later roll once all have told. So whoever has not found it opens groups by now.
        if self._call.all_told(former) and not self._call.all_begun(former):
            return "the ranks had not begun to step together"
        return None

    def replaces(self, rank: int, exit_code: int) -> bool:
        """Return True if a new process takes the place of one that has ended so, and count it."""
        self._call.forget(rank)
        self._attempts[rank] += 1
        return exit_code < 0 and self._attempts[rank] <= _ATTEMPTS

    def admit(self) -> None:
        """Write the roll with all replicas that wait, if the members have left theirs for it."""
        if not self._call.is_left(self.roll):
            return
        waiting = [rank for one in self._call.waiting(self._replicas) for rank in one]
        for rank in waiting:
            self._call.forget(rank)
            self._attempts[rank] = 0
        self._write([*self.roll.members, *waiting])

    def _write(self, members: Sequence[int]) -> None:
        self.roll = Roll(self.roll.number + 1, tuple(sorted(members)))
        self._call.write(self.roll)
