"""The open registry of instruction kinds.

A kind names its stream, the values it reads and writes and what it owes to the runtime; engine, verifier
and simulator treat all kinds alike. A new kind is registered, never special-cased: from its values alone the
verifier proves that it stands at its place in a program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.bundles import bundles, parts
from weft.errors import InputError, Violation
from weft.program import places
from weft.program.values import VALUES, Read, Use, ValueRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of instruction.

    Attributes:
        name: how run files, tables and handlers call it.
        symbol: one or two letters for tables and pictures.
        stream: instructions of one rank, stream and peer run one after the other; different streams overlap.
        reads, writes: the values it needs and makes, which the verifier follows; a name alone is a use at
            the instruction's own coordinates.
        collective: all ranks of its group take part and end together.
        tensor_reduced: the tensor ranks of a replica all-reduce within it, so that they run it together.
        spans_stages: a collective whose members may run it for different stages.
        joins_replicas: a collective whose members have the same weights of a stage, or shares of the same.
    """

    name: str
    symbol: str
    stream: str
    reads: tuple[str | Read, ...] = ()
    writes: tuple[str | Use, ...] = ()
    collective: bool = False
    tensor_reduced: bool = False
    spans_stages: bool = False
    joins_replicas: bool = False

    @property
    def all_reads(self) -> tuple[Read, ...]:
        """What it reads, and where; what methods have it read, too."""
        added = (use for one in parts(AddedUses) if self.name in one.kinds for use in one.reads)
        return tuple(Read(use) if isinstance(use, str) else use for use in (*self.reads, *added))

    @property
    def all_writes(self) -> tuple[Use, ...]:
        """What it makes, and where; what methods have it make, too."""
        added = (use for one in parts(AddedUses) if self.name in one.kinds for use in one.writes)
        return tuple(Use(use) if isinstance(use, str) else use for use in (*self.writes, *added))


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedUses:
    """What a method has instructions of other kinds read and make; the method contributes it."""

    kinds: tuple[str, ...]
    reads: tuple[str | Read, ...] = ()
    writes: tuple[str | Use, ...] = ()


class KindRegistry:
    """Kinds by name and by code; codes count up in order of registration and never leave the process."""

    def __init__(self, values: ValueRegistry) -> None:
        self._values = values
        self._kinds: list[Kind] = []
        self._codes: dict[str, int] = {}

    def register(self, kind: Kind) -> int:
        """Add a kind and return its code.

        Raises:
            InputError: when the name is taken by a different kind, or a value has not been declared.
        """
        for use in kind.writes:
            self._values.require(use if isinstance(use, str) else use.value, f"{kind.name} writes")
        for read in kind.reads:
            for choice in read.choices if isinstance(read, Read) else (Read(read),):
                self._values.require(choice.value, f"{kind.name} reads")
        known = self._codes.get(kind.name)
        if known is not None:
            if self._kinds[known] != kind:
                raise InputError(Violation("kinds", f"{kind.name!r} is already registered differently"))
            return known
        self._codes[kind.name] = len(self._kinds)
        self._kinds.append(kind)
        return self._codes[kind.name]

    def code(self, name: str) -> int:
        """The code of a kind; methods are looked for where nobody here has registered it."""
        if name not in self._codes:
            bundles()
        return self._codes[name]

    def __getitem__(self, code: int) -> Kind:
        return self._kinds[code]

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


def name_hash(name: str) -> int:
    """A 64-bit hash of a kind's name that is the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


KINDS = KindRegistry(VALUES)

_ARRIVED = Read("message", at=places.there, consumes=True)
_OUTPUT_GRADIENT = Read(
    "output_gradient", at=places.from_next, otherwise=Read("input_gradient", at=places.of_next)
)
_SAVED = Read("saved", consumes=True)
_SAVED_FOR_WEIGHT = Read("saved_for_weight", consumes=True)

FORWARD = KINDS.register(
    Kind(
        name="forward",
        symbol="F",
        stream="compute",
        reads=(
            Read("activation", at=places.from_previous, otherwise=Read("output", at=places.of_previous)),
            "weights",
        ),
        writes=("output", Use("saved", at=places.trained)),
        tensor_reduced=True,
    )
)
BACKWARD = KINDS.register(
    Kind(
        name="backward",
        symbol="B",
        stream="compute",
        reads=(_SAVED, _OUTPUT_GRADIENT, "weights"),
        writes=("input_gradient", "weight_gradient"),
        tensor_reduced=True,
    )
)
BACKWARD_INPUT = KINDS.register(
    Kind(
        name="backward_input",
        symbol="I",
        stream="compute",
        reads=(_SAVED, _OUTPUT_GRADIENT, "weights"),
        writes=("input_gradient", "saved_for_weight"),
        tensor_reduced=True,
    )
)
BACKWARD_WEIGHT = KINDS.register(
    Kind(
        name="backward_weight",
        symbol="W",
        stream="compute",
        reads=(_SAVED_FOR_WEIGHT,),
        writes=("weight_gradient",),
    )
)
SEND_ACTIVATION = KINDS.register(
    Kind(
        name="send_activation",
        symbol="SF",
        stream="send_activation",
        reads=(Read("output", at=places.of_sent),),
        writes=("message",),
    )
)
RECEIVE_ACTIVATION = KINDS.register(
    Kind(
        name="receive_activation",
        symbol="RF",
        stream="receive_activation",
        reads=(_ARRIVED,),
        writes=("activation",),
    )
)
SEND_GRADIENT = KINDS.register(
    Kind(
        name="send_gradient",
        symbol="SB",
        stream="send_gradient",
        reads=(Read("input_gradient", at=places.of_sent),),
        writes=("message",),
    )
)
RECEIVE_GRADIENT = KINDS.register(
    Kind(
        name="receive_gradient",
        symbol="RB",
        stream="receive_gradient",
        reads=(_ARRIVED,),
        writes=("output_gradient",),
    )
)
STEP = KINDS.register(
    Kind(
        name="step",
        symbol="O",
        stream="compute",
        reads=(Read("reduced_gradient", consumes=True, otherwise=Read("weight_gradient", consumes=True)),),
        writes=("weights",),
    )
)

# A send and the receive that takes its message.
MESSAGES: tuple[tuple[int, int], ...] = (
    (SEND_ACTIVATION, RECEIVE_ACTIVATION),
    (SEND_GRADIENT, RECEIVE_GRADIENT),
)

# What computes on a micro-batch.
COMPUTATIONS: tuple[int, ...] = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)

# What reads the weights of a stage, and what adds to their gradient.
READS_WEIGHTS: tuple[int, ...] = (FORWARD, BACKWARD, BACKWARD_INPUT)
MAKES_GRADIENTS: tuple[int, ...] = (BACKWARD, BACKWARD_WEIGHT)


def all_kinds() -> KindRegistry:
    """All kinds of this installation, for names that come from outside: those of every method, too."""
    bundles()
    return KINDS


def kinds_reading(value: str) -> tuple[int, ...]:
    """The codes of the kinds that read a value, or may."""
    return tuple(
        code
        for code, kind in enumerate(KINDS)
        if any(choice.value == value for read in kind.all_reads for choice in read.choices)
    )


def kinds_writing(*values: str) -> tuple[int, ...]:
    """The codes of the kinds that write one of the values."""
    return tuple(
        code for code, kind in enumerate(KINDS) if any(use.value in values for use in kind.all_writes)
    )


_Codes = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


def is_compute(kind: _Codes) -> _Mask:
    """Which kind codes run on the compute stream."""
    return np.array([entry.stream == "compute" for entry in KINDS], dtype=np.bool_)[kind]


def is_collective(kind: _Codes) -> _Mask:
    """Which kind codes all ranks of a group take part in."""
    return np.array([entry.collective for entry in KINDS], dtype=np.bool_)[kind]


def is_send(kind: _Codes) -> _Mask:
    """Which kind codes send a message."""
    return is_any_of(kind, [send for send, _ in MESSAGES])


def is_any_of(kind: _Codes, wanted: Sequence[int]) -> _Mask:
    """Which kind codes are among the wanted ones; there are few kinds, so that a table tells fastest."""
    table = np.zeros(len(KINDS), dtype=np.bool_)
    table[list(wanted)] = True
    return table[kind]
