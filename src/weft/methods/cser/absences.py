"""The absences of replicas: the resets that each misses, and the reset by which it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Absence(NamedTuple):
    """The resets `first` to `last` that a replica misses, counted from 0 in a cycle of resets.

    The replica steps until the reset before, and again after the reset behind, by which it comes back.
    """

    replica: int
    first: int
    last: int

    @property
    def back(self) -> int:
        """The reset by which the replica comes back."""
        return self.last + 1

    def __str__(self) -> str:
        one = self.first == self.last
        missed = f"reset {self.first}" if one else f"resets {self.first} to {self.last}"
        return f"missed {missed}, rejoined at {self.back}"


@dataclass(frozen=True, slots=True)
class Absences:
    """The absences in a cycle of `rounds` resets, one after every `every` steps."""

    every: int = 1
    rounds: int = 1
    missed: tuple[Absence, ...] = ()

    @property
    def cycle(self) -> int:
        """The steps after which absences come again."""
        return self.every * self.rounds

    def round_of(self, step: int) -> int:
        """Return the number of the reset that ends a step's round."""
        return step % self.cycle // self.every

    def computes(self, replica: int, step: int) -> bool:
        """Return True if a replica runs its micro-batches of a step."""
        return self._computes_in(replica, self.round_of(step))

    def meets(self, replica: int, step: int) -> bool:
        """Return True if a replica takes part in the reset of a step's round."""
        number = self.round_of(step)
        return not any(one.replica == replica and one.first <= number <= one.last for one in self.missed)

    def ended_by(self, step: int) -> tuple[Absence, ...]:
        """Return the absences that the reset after a step ends; their resets are counted over the job."""
        if (step + 1) % self.every:
            return ()
        ended = (one for one in self.missed if one.back == self.round_of(step))
        return tuple(self._of_job(one, step) for one in ended)

    def begun_after(self, step: int) -> tuple[Absence, ...]:
        """Return the absences that begin after a step; their resets are counted over the job."""
        if (step + 1) % self.every:
            return ()
        begun = (one for one in self.missed if one.first == self.round_of(step + 1))
        return tuple(self._of_job(one, step + 1) for one in begun)

    def returns(self, replica: int, step: int) -> bool:
        """Return True if a replica comes back by the reset after a step."""
        return any(one.replica == replica for one in self.ended_by(step))

    def next_reset(self, replica: int, step: int) -> int:
        """Return the first step, this one or a later one, after which a replica takes part in a reset."""
        end = step + self.every - 1 - step % self.every
        return next(one for one in range(end, end + self.cycle, self.every) if self.meets(replica, one))

    def taken(self, replicas: int) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the steps of a cycle that each replica takes."""
        return tuple(
            tuple(step for step in range(self.cycle) if self.computes(replica, step))
            for replica in range(replicas)
        )

    def problem(self, replicas: int) -> str | None:
        """Return why so many replicas cannot be absent so; None if they can."""
        known = range(replicas)
        for one in self.missed:
            if one.replica not in known:
                return f"replica {one.replica} is not one of 0 to {replicas - 1}"
        for number in range(self.rounds):
            if not any(self._computes_in(replica, number) for replica in known):
                return f"no replica steps before reset {number}"
        return None

    def _of_job(self, one: Absence, step: int) -> Absence:
        before = step // self.cycle * self.rounds
        return one._replace(first=before + one.first, last=before + one.last)

    def _computes_in(self, replica: int, number: int) -> bool:
        return not any(one.replica == replica and one.first <= number <= one.back for one in self.missed)


def absences_in(text: str) -> Sequence[Absence]:
    """Return the absences that a text names, such as "2: 4-6, 0: 8", by replica and reset.

    Raises:
        ValueError: with the part that names none.
    """
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        replica, _, resets = part.partition(":")
        first, dash, last = resets.partition("-")
        numbers = [one.strip() for one in (replica, first, last if dash else first)]
        if not all(one.isdecimal() for one in numbers):
            raise ValueError(part)
        found.append(Absence(*map(int, numbers)))
    return sorted(found)


def first_problem(missed: Sequence[Absence], rounds: int) -> str | None:
    """Return what is wrong with absences, by replica and reset, whatever the replicas; None if nothing is."""
    for one in missed:
        if one.first < 1:
            return f"replica {one.replica} misses reset 0, and all replicas begin together"
        if one.last < one.first:
            return f"replica {one.replica}: reset {one.last} comes before reset {one.first}"
        if one.back >= rounds:
            return (
                f"replica {one.replica} misses reset {one.last}, and all meet at reset {rounds - 1}, the last"
            )
    for former, later in pairwise(missed):
        if former.replica == later.replica and later.first <= former.back + 1:
            return f"replica {later.replica} is away again before it has stepped; join the two absences"
    return None
