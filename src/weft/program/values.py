"""The open registry of values: the data that instructions make for each other, and their lifetimes.

A kind of instruction declares its uses of values. The verifier needs only these declarations for its proof:
A value is made before it is read, stays whole until the last read, and is used up. A method that adds kinds
declares their values here or in its own file. The verifier does not change.
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
    """A kind of value that instructions make and read.

    Attributes:
        name: its name in the declarations of kinds.
        scope: the coordinates that distinguish its values, in addition to the rank and the step. Values that
            last until they are written again have no step.
        until: its end. ``freed``: a read of its step must consume it. ``read``: an instruction must read it
            in its step. ``step``: it ends with its step, read or not. ``written``: it ends when it is written
            again, perhaps in a later step; before the first write it has an initial content.
        accumulates: several writes add up; all come before the first read.
    """

    name: str
    scope: tuple[Coordinate, ...]
    until: Literal["freed", "read", "step", "written"]
    accumulates: bool = False

    @property
    def carried(self) -> bool:
        """True if the value outlives the step that makes it."""
        return self.until == "written"


@dataclass(frozen=True, slots=True)
class Use:
    """A value that an instruction makes, at its own coordinates or at the places of `at`."""

    value: str
    at: At = own


@dataclass(frozen=True, slots=True)
class Read(Use):
    """A value that an instruction reads.

    Attributes:
        consumes: nothing may read the value afterwards.
        waits: the edges that the verifier requires. ``each``: one from every write to this read. ``first``:
            one to the first of the reads in a queue; the others follow it. ``last``: one from the last of the
            writes in a queue, or from a later row there.
        otherwise: the alternative where nothing makes the value; its `at` returns the same places in order.
    """

    consumes: bool = False
    waits: Waits = "each"
    otherwise: Read | None = None

    @property
    def choices(self) -> tuple[Read, ...]:
        """This read and its alternatives, in order."""
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
            InputError: when a different value has the name, or the value both accumulates and is carried.
        """
        if self._values.setdefault(value.name, value) != value:
            raise InputError(Violation("values", f"{value.name!r} is already registered differently"))
        if value.accumulates and value.carried:
            problem = f"{value.name!r} adds up until it is written again, which is at once"
            raise InputError(Violation("values", problem))
        return value

    def require(self, name: str, user: str) -> None:
        """Check that a value has this name; `user` names its user in the error.

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
    # A step makes a shard of the weights, or all weights if replicas shard nothing.
    ValueKind(name="weights", scope=PER_STAGE, until="written"),
    ValueKind(name="weight_gradient", scope=PER_STAGE, until="freed", accumulates=True),
    ValueKind(name="reduced_gradient", scope=PER_STAGE, until="freed", accumulates=True),
)
