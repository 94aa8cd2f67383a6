"""The open registry of instruction kinds.

A kind names its stream, the values it reads and writes, and its duties to the runtime. Engine, verifier and
simulator treat all kinds alike. A new kind is registered and needs no special case. From its values alone the
verifier proves its place in a program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weft.bundles import bundles, parts
from weft.errors import InputError, Violation
from weft.program import places
from weft.program.arrays import Ints, Mask
from weft.program.values import VALUES, Read, Use, ValueRegistry


def kind_words(name: str) -> str:
    """Return the name of a kind for people."""
    return name.replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of instruction.

    Attributes:
        name: its name in run files, tables and handlers.
        symbol: one or two letters for tables and pictures.
        stream: instructions of one rank, stream and peer run one after the other; different streams overlap.
        reads, writes: the values it needs and makes, which the verifier follows; a name alone is a use at
            the instruction's own coordinates.
        collective: all ranks of its group take part and end together.
        tensor_reduced: the tensor ranks of a replica all-reduce within it, so they run it together.
        spans_stages: members of the collective may run it for different stages.
        joins_replicas: members of the collective have the same weights of a stage, or shards of them.
        receives: of the receiving end of a message, the name of the kind that sends it.
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
    receives: str | None = None

    @property
    def words(self) -> str:
        """Its name for people."""
        return kind_words(self.name)

    @property
    def all_reads(self) -> tuple[Read, ...]:
        """The values it reads and their places, including reads that methods add."""
        added = (use for one in parts(AddedUses) if self.name in one.kinds for use in one.reads)
        return tuple(Read(use) if isinstance(use, str) else use for use in (*self.reads, *added))

    @property
    def all_writes(self) -> tuple[Use, ...]:
        """The values it makes and their places, including writes that methods add."""
        added = (use for one in parts(AddedUses) if self.name in one.kinds for use in one.writes)
        return tuple(Use(use) if isinstance(use, str) else use for use in (*self.writes, *added))


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedUses:
    """Reads and writes that a method adds to existing kinds; the method contributes it (`weft.bundles`)."""

    kinds: tuple[str, ...]
    reads: tuple[str | Read, ...] = ()
    writes: tuple[str | Use, ...] = ()


class KindRegistry:
    """Kinds by name and by code; codes count registrations and are valid in this process only."""

    def __init__(self, values: ValueRegistry) -> None:
        self._values = values
        self._kinds: list[Kind] = []
        self._codes: dict[str, int] = {}

    def register(self, kind: Kind) -> int:
        """Add a kind and return its code.

        Raises:
            InputError: when a different kind has the name, or a value is not declared.
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
        """Return the code of a kind, loading all methods for an unknown name; KeyError if none has it."""
        if name not in self._codes:
            bundles()
        return self._codes[name]

    @property
    def messages(self) -> tuple[tuple[int, int], ...]:
        """The codes of pairs of a send and its receive."""
        return tuple(
            (self._codes[one.receives], code)
            for code, one in enumerate(self._kinds)
            if one.receives is not None
        )

    def __getitem__(self, code: int) -> Kind:
        return self._kinds[code]

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


# The stream of codecs with instructions of their own, which meet no other rank.
CODEC = "codec"
# Those of exchanges with servers: one piece goes there while another comes back.
TO_SERVERS, FROM_SERVERS = "to servers", "from servers"


def name_hash(name: str) -> int:
    """Return a 64-bit hash of a kind's name that is the same in every process and version."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


KINDS = KindRegistry(VALUES)

_OUTPUT_GRADIENT = Read(
    "output_gradient", at=places.from_next, otherwise=Read("input_gradient", at=places.of_next)
)
_SAVED = Read("saved", consumes=True)
_SAVED_FOR_WEIGHT = Read("saved_for_weight", consumes=True)
_BACK = (_SAVED, _OUTPUT_GRADIENT, "weights")
_BEFORE = Read("activation", at=places.from_previous, otherwise=Read("output", at=places.of_previous))
_STEPPED = Read("reduced_gradient", consumes=True, otherwise=Read("weight_gradient", consumes=True))


def computation(
    name: str, symbol: str, reads: Sequence[str | Read], writes: Sequence[str | Use], *, reduced: bool = False
) -> int:
    """Register a kind that computes on its rank and return its code; `reduced` is `Kind.tensor_reduced`."""
    return KINDS.register(
        Kind(
            name=name,
            symbol=symbol,
            stream="compute",
            reads=tuple(reads),
            writes=tuple(writes),
            tensor_reduced=reduced,
        )
    )


def message(payload: str, symbol: str, sent: Read, received: str, value: str = "message") -> tuple[int, int]:
    """Register both ends of a message, each with its own stream, and return their codes.

    Args:
        payload: the kinds are `send_` and `receive_` this; their symbols end with `symbol`.
        sent: the value that the sender reads.
        received: the value that the receiver makes.
        value: the message itself, with the scope of `message`; payloads of one value are never under way
            between the same stages for the same micro-batch.
    """
    send, receive = (f"{word}_{payload}" for word in ("send", "receive"))
    ends = (
        Kind(name=send, symbol=f"S{symbol}", stream=send, reads=(sent,), writes=(value,)),
        Kind(
            name=receive,
            symbol=f"R{symbol}",
            stream=receive,
            reads=(Read(value, at=places.there, consumes=True),),
            writes=(received,),
            receives=send,
        ),
    )
    return KINDS.register(ends[0]), KINDS.register(ends[1])


FORWARD = computation(
    "forward", "F", (_BEFORE, "weights"), ("output", Use("saved", at=places.trained)), reduced=True
)
BACKWARD = computation("backward", "B", _BACK, ("input_gradient", "weight_gradient"), reduced=True)
BACKWARD_INPUT = computation(
    "backward_input", "I", _BACK, ("input_gradient", "saved_for_weight"), reduced=True
)
BACKWARD_WEIGHT = computation("backward_weight", "W", (_SAVED_FOR_WEIGHT,), ("weight_gradient",))
SEND_ACTIVATION, RECEIVE_ACTIVATION = message(
    "activation", "F", Read("output", at=places.of_sent), "activation"
)
SEND_GRADIENT, RECEIVE_GRADIENT = message(
    "gradient", "B", Read("input_gradient", at=places.of_sent), "output_gradient"
)
STEP = computation("step", "O", (_STEPPED,), ("weights",))

# Pairs of a send and its receive, of the passes that train.
MESSAGES: tuple[tuple[int, int], ...] = (
    (SEND_ACTIVATION, RECEIVE_ACTIVATION),
    (SEND_GRADIENT, RECEIVE_GRADIENT),
)

# The computations on a micro-batch.
COMPUTATIONS: tuple[int, ...] = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)

# The kinds that read the weights of a stage, and the kinds that add to their gradient.
READS_WEIGHTS: tuple[int, ...] = (FORWARD, BACKWARD, BACKWARD_INPUT)
MAKES_GRADIENTS: tuple[int, ...] = (BACKWARD, BACKWARD_WEIGHT)


def all_kinds() -> KindRegistry:
    """Return all kinds of this installation, including every method's, to look up names from outside."""
    bundles()
    return KINDS


def kinds_reading(value: str) -> tuple[int, ...]:
    """Return the codes of the kinds that read a value, or may read it as an alternative."""
    return tuple(
        code
        for code, kind in enumerate(KINDS)
        if any(choice.value == value for read in kind.all_reads for choice in read.choices)
    )


def kinds_writing(*values: str) -> tuple[int, ...]:
    """Return the codes of the kinds that write one of the values."""
    return tuple(
        code for code, kind in enumerate(KINDS) if any(use.value in values for use in kind.all_writes)
    )


def is_compute(kind: Ints) -> Mask:
    """Return True for each kind code that runs on the compute stream."""
    return np.array([entry.stream == "compute" for entry in KINDS], dtype=np.bool_)[kind]


def is_collective(kind: Ints) -> Mask:
    """Return True for each kind code of a collective."""
    return np.array([entry.collective for entry in KINDS], dtype=np.bool_)[kind]


def joins_replicas(kind: Ints) -> Mask:
    """Return True for each kind code of a collective among replicas with the same weights."""
    return np.array([entry.joins_replicas for entry in KINDS], dtype=np.bool_)[kind]


def message_kinds() -> tuple[tuple[int, int], ...]:
    """Return the codes of all pairs of a send and its receive, also those of methods."""
    return KINDS.messages


def is_send(kind: Ints) -> Mask:
    """Return True for each kind code that sends a message."""
    return is_any_of(kind, [send for send, _ in message_kinds()])


def is_any_of(kind: Ints, wanted: Sequence[int]) -> Mask:
    """Return True for each kind code in `wanted`; a lookup table is fastest, because there are few kinds."""
    table = np.zeros(len(KINDS), dtype=np.bool_)
    table[list(wanted)] = True
    return table[kind]
