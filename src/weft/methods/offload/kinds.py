"""The instructions of offload, their values, and the obligation of programs to offload.

Copies have streams of their own: `copy_out` to the host and `copy_in` back. Two kinds of the compute stream
mark where memory changes: `release` waits for the copy to the host and frees it, `room` takes it again for
the copy back. Rows of optimizer states have no micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import KINDS, AddedUses, Kind
from weft.program.places import Places
from weft.program.program import NONE, Owed, Program
from weft.program.values import PER_MICRO_BATCH, PER_STAGE, VALUES, Read, ValueKind

VALUES.register(ValueKind(name="room", scope=PER_MICRO_BATCH, until="freed"))
VALUES.register(ValueKind(name="stored_activations", scope=PER_MICRO_BATCH, until="freed"))
VALUES.register(ValueKind(name="loaded_states", scope=PER_STAGE, until="freed"))
# In host memory; a step makes them anew for the next one.
VALUES.register(ValueKind(name="stored_states", scope=PER_STAGE, until="written"))


def _of_activations(program: Program, rows: Ints) -> Places:
    return Places(rows[program.columns.micro_batch[rows] != NONE])


def _of_states(program: Program, rows: Ints) -> Places:
    return Places(rows[program.columns.micro_batch[rows] == NONE])


STORE_ACTIVATIONS = KINDS.register(
    Kind(
        name="store_activations",
        symbol="SA",
        stream="copy_out",
        reads=("saved",),
        writes=("stored_activations",),
    )
)
LOAD_ACTIVATIONS = KINDS.register(
    Kind(
        name="load_activations",
        symbol="LA",
        stream="copy_in",
        reads=(Read("room", consumes=True), Read("stored_activations", consumes=True)),
        writes=("saved",),
    )
)
STORE_STATES = KINDS.register(
    Kind(
        name="store_states",
        symbol="SO",
        stream="copy_out",
        reads=(Read("loaded_states", consumes=True),),
        writes=("stored_states",),
    )
)
LOAD_STATES = KINDS.register(
    Kind(
        name="load_states",
        symbol="LO",
        stream="copy_in",
        reads=(Read("room", consumes=True), "stored_states"),
        writes=("loaded_states",),
    )
)
RELEASE = KINDS.register(
    Kind(
        name="release",
        symbol="r",
        stream="compute",
        reads=(
            Read("saved", at=_of_activations, consumes=True),
            Read("stored_activations", at=_of_activations),
            Read("stored_states", at=_of_states),
        ),
    )
)
ROOM = KINDS.register(Kind(name="room", symbol="m", stream="compute", writes=("room",)))


@dataclass(frozen=True, kw_only=True)
class Offloads(Owed):
    """The obligation to offload the states and the activations of these stages."""

    states: tuple[int, ...] = ()
    activations: tuple[int, ...] = ()

    @property
    def facts(self) -> Mapping[str, str]:
        chosen = (("states", self.states), ("activations", self.activations))
        return {f"offloaded {word}": f"stages {', '.join(map(str, one))}" for word, one in chosen if one}


def owed_by(program: Program) -> Offloads:
    """Return the obligation of a program; one without stages if it offloads nothing."""
    owed = program.obligations.methods.get("offload")
    return owed if isinstance(owed, Offloads) else Offloads()


def stepped_from_host(program: Program, rows: Ints) -> Places:
    """Return the rows of stages with states in host memory."""
    return Places(rows[np.isin(program.columns.stage[rows], owed_by(program).states)])


USES = (AddedUses(kinds=("step",), reads=(Read("loaded_states", at=stepped_from_host),)),)
