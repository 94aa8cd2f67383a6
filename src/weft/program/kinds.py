"""The open registry of instruction kinds.

A kind names its stream, the values it reads and writes and what it owes to the runtime; engine, verifier
and simulator treat all kinds alike. A new kind is registered, never special-cased.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.bundles import bundles
from weft.errors import InputError, Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of instruction.

    Attributes:
        name: how run files, tables and handlers call it.
        symbol: one or two letters for tables and pictures.
        stream: instructions of one rank, stream and peer run one after the other; different streams overlap.
        reads, writes: names of the values it needs and makes, for people and for the verifier.
        collective: all ranks of its group take part and end together.
        tensor_reduced: the tensor ranks of a replica all-reduce within it, so that they run it together.
        spans_stages: a collective whose members may run it for different stages.
    """

    name: str
    symbol: str
    stream: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    collective: bool = False
    tensor_reduced: bool = False
    spans_stages: bool = False


class KindRegistry:
    """Kinds by name and by code; codes count up in order of registration and never leave the process."""

    def __init__(self) -> None:
        self._kinds: list[Kind] = []
        self._codes: dict[str, int] = {}

    def register(self, kind: Kind) -> int:
        """Add a kind and return its code.

        Raises:
            InputError: when the name is taken by a different kind.
        """
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


KINDS = KindRegistry()

FORWARD = KINDS.register(
    Kind(
        name="forward",
        symbol="F",
        stream="compute",
        reads=("activation", "weights"),
        writes=("output", "saved"),
        tensor_reduced=True,
    )
)
BACKWARD = KINDS.register(
    Kind(
        name="backward",
        symbol="B",
        stream="compute",
        reads=("saved", "output_gradient"),
        writes=("input_gradient", "weight_gradient"),
        tensor_reduced=True,
    )
)
BACKWARD_INPUT = KINDS.register(
    Kind(
        name="backward_input",
        symbol="I",
        stream="compute",
        reads=("saved", "output_gradient"),
        writes=("input_gradient", "saved_for_weight"),
        tensor_reduced=True,
    )
)
BACKWARD_WEIGHT = KINDS.register(
    Kind(
        name="backward_weight",
        symbol="W",
        stream="compute",
        reads=("saved_for_weight",),
        writes=("weight_gradient",),
    )
)
SEND_ACTIVATION = KINDS.register(
    Kind(
        name="send_activation", symbol="SF", stream="send_activation", reads=("output",), writes=("message",)
    )
)
RECEIVE_ACTIVATION = KINDS.register(
    Kind(
        name="receive_activation",
        symbol="RF",
        stream="receive_activation",
        reads=("message",),
        writes=("activation",),
    )
)
SEND_GRADIENT = KINDS.register(
    Kind(
        name="send_gradient",
        symbol="SB",
        stream="send_gradient",
        reads=("input_gradient",),
        writes=("message",),
    )
)
RECEIVE_GRADIENT = KINDS.register(
    Kind(
        name="receive_gradient",
        symbol="RB",
        stream="receive_gradient",
        reads=("message",),
        writes=("output_gradient",),
    )
)
STEP = KINDS.register(
    Kind(
        name="step",
        symbol="O",
        stream="compute",
        reads=("reduced_gradient",),
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


def kinds_reading(value: str) -> tuple[int, ...]:
    """The codes of the kinds that read a value."""
    return tuple(code for code, kind in enumerate(KINDS) if value in kind.reads)


def kinds_writing(value: str) -> tuple[int, ...]:
    """The codes of the kinds that write a value."""
    return tuple(code for code, kind in enumerate(KINDS) if value in kind.writes)


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
