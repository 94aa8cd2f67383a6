"""The open registry of values: what instructions make for each other, and how long it lasts.

A kind of instruction declares its uses of values. From these declarations alone the verifier proves of every
program that each value is made before it is read, stays whole until the last read, and is used up. A method
that adds kinds declares their values here, or in a file of its own, and nothing of the verifier changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from weft.errors import InputError, Violation, nearest
from weft.program.places import At, own

Coordinate = Literal["stage", "replica", "micro_batch", "part", "peer"]

PER_MICRO_BATCH: tuple[Coordinate, ...] = ("stage", "replica", "micro_batch")
PER_STAGE: tuple[Coordinate, ...] = ("stage", "replica")
PER_RANK: tuple[Coordinate, ...] = ()

Waits = Literal["each", "first", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueKind:
    """Something that instructions make and read.

    Attributes:
        name: how kinds call it.
        scope: the coordinates that tell one from another, beside the rank; beside the step, too, unless it
            lasts until it is written again.
        until: how it ends. ``freed``: a read of its step must consume it. ``read``: somebody must read it in
            its step. ``step``: with its step, read or not. ``written``: when it is made anew, perhaps by a
            later step; what nobody has made yet is there from the start.
        accumulates: several writes add up; all come before the first read.
    """

    name: str
    scope: tuple[Coordinate, ...]
    until: Literal["freed", "read", "step", "written"]
    accumulates: bool = False

    @property
    def carried(self) -> bool:
        """Whether it outlives the step that makes it."""
        return self.until == "written"


@dataclass(frozen=True, slots=True)
class Use:
    """An instruction makes a value, at its own coordinates or where `at` says."""

    value: str
    at: At = own


@dataclass(frozen=True, slots=True)
class Read(Use):
    """An instruction reads a value.

    Attributes:
        consumes: nothing may read it afterwards.
        waits: which edges the verifier asks for. ``each``: one from every write to this read. ``first``: the
            first of the reads in a queue has one, the others follow it. ``last``: one from the last of the
            writes in a queue, or from what follows it there.
        otherwise: what is read where nothing makes the value; its `at` gives the same places in turn.
    """

    consumes: bool = False
    waits: Waits = "each"
    otherwise: Read | None = None

    @property
    def choices(self) -> tuple[Read, ...]:
        """This read and what stands in for it, in turn."""
        return (self, *(self.otherwise.choices if self.otherwise else ()))


class ValueRegistry:
    """Values by name."""

    def __init__(self, *values: ValueKind) -> None:
        self._values: dict[str, ValueKind] = {}
        for value in values:
            self.register(value)

    def register(self, value: ValueKind) -> ValueKind:
        """Add a value and return it.

        Raises:
            InputError: when the name is taken by a different value, or it both accumulates and is carried.
        """
        if self._values.setdefault(value.name, value) != value:
            raise InputError(Violation("values", f"{value.name!r} is already registered differently"))
        if value.accumulates and value.carried:
            problem = f"{value.name!r} adds up until it is written again, which is at once"
            raise InputError(Violation("values", problem))
        return value

    def require(self, name: str, user: str) -> None:
        """Refuse a name that no value has; `user` says who uses it.

        Raises:
            InputError: with the nearest name.
        """
        if name not in self._values:
            problem = f"{user} {name!r}, a value that nobody has declared"
            raise InputError(Violation("kinds", problem, nearest(name, self._values)))

    def __getitem__(self, name: str) -> ValueKind:
        return self._values[name]

    def __iter__(self) -> Iterator[ValueKind]:
        return iter(self._values.values())


VALUES = ValueRegistry(
    ValueKind(name="activation", scope=(*PER_MICRO_BATCH, "part"), until="read"),
    ValueKind(name="output", scope=PER_MICRO_BATCH, until="step"),
    ValueKind(name="saved", scope=PER_MICRO_BATCH, until="freed"),
    ValueKind(name="output_gradient", scope=(*PER_MICRO_BATCH, "part"), until="read"),
    ValueKind(name="input_gradient", scope=PER_MICRO_BATCH, until="step"),
    ValueKind(name="saved_for_weight", scope=PER_MICRO_BATCH, until="freed"),
    ValueKind(name="message", scope=("peer", "stage", "part", "micro_batch"), until="freed"),
    # What a step makes: a share of the weights, or all where replicas share nothing out.
    ValueKind(name="weights", scope=PER_STAGE, until="written"),
    ValueKind(name="weight_gradient", scope=PER_STAGE, until="freed", accumulates=True),
    ValueKind(name="reduced_gradient", scope=PER_STAGE, until="freed", accumulates=True),
)
