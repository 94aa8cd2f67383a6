"""The instructions that exchange one piece of a gradient, their values, and the obligation to run them.

A piece is a `part` of its stage's gradient. After all pieces comes the stage's reduction, which adds up the
parameters that are sent whole. Replicas own the sums, or servers. These hold no stage, and their rows have no
replica. Both sides run the exchanges with servers, and each side its own part of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from weft.program.arrays import Ints
from weft.program.codes import numbered
from weft.program.kinds import CODEC, FROM_SERVERS, KINDS, TO_SERVERS, AddedUses, Kind
from weft.program.places import Places
from weft.program.program import NONE, Owed, Program
from weft.program.values import PER_STAGE, VALUES, Read, Use, ValueKind

# The content of a piece between two instructions.
BETWEEN = ("compressed_piece", "pushed_piece", "aggregated_piece", "pulled_piece", "decompressed_piece")
for _name in BETWEEN:
    VALUES.register(ValueKind(name=_name, scope=(*PER_STAGE, "part"), until="freed"))


def _codec(name: str, symbol: str, reads: str | Read, writes: str) -> int:
    """Register a computation of the codecs, which have a stream of their own, and return its code."""
    return KINDS.register(Kind(name=name, symbol=symbol, stream=CODEC, reads=(reads,), writes=(writes,)))


def _exchange(name: str, symbol: str, reads: str, writes: str) -> int:
    """Register a collective of all replicas and return its code."""
    return KINDS.register(
        Kind(
            name=name,
            symbol=symbol,
            stream="collective",
            reads=(Read(reads, consumes=True),),
            writes=(writes,),
            collective=True,
            joins_replicas=True,
        )
    )


def _on_replicas(program: Program, rows: Ints) -> Places:
    """Return the instruction's own coordinates if its rank holds a stage."""
    return Places(rows[program.columns.replica[rows] != NONE])


def _on_servers(program: Program, rows: Ints) -> Places:
    """Return the instruction's own coordinates if its rank is a server."""
    return Places(rows[program.columns.replica[rows] == NONE])


def _served(name: str, symbol: str, stream: str, reads: Read, writes: Use) -> int:
    """Register a collective of replicas and servers, in one direction, and return its code."""
    kind = Kind(name=name, symbol=symbol, stream=stream, reads=(reads,), writes=(writes,), collective=True)
    return KINDS.register(kind)


COMPRESS = _codec("compress", "CP", "weight_gradient", BETWEEN[0])
PUSH = _exchange("push", "PU", BETWEEN[0], BETWEEN[1])
AGGREGATE = _codec("aggregate", "AG", Read(BETWEEN[1], consumes=True), BETWEEN[2])
PULL = _exchange("pull", "PL", BETWEEN[2], BETWEEN[3])
DECOMPRESS = _codec("decompress", "DC", Read(BETWEEN[3], consumes=True), BETWEEN[4])
PUSH_TO_SERVERS = _served(
    "push_to_servers",
    "PS",
    TO_SERVERS,
    Read(BETWEEN[0], at=_on_replicas, consumes=True),
    Use(BETWEEN[1], at=_on_servers),
)
PULL_FROM_SERVERS = _served(
    "pull_from_servers",
    "LS",
    FROM_SERVERS,
    Read(BETWEEN[2], at=_on_servers, consumes=True),
    Use(BETWEEN[3], at=_on_replicas),
)
# Of replicas that own sums, or of both sides where servers do.
EXCHANGE = (COMPRESS, PUSH, AGGREGATE, PULL, DECOMPRESS)
SERVED_EXCHANGE = (COMPRESS, PUSH_TO_SERVERS, AGGREGATE, PULL_FROM_SERVERS, DECOMPRESS)


@dataclass(frozen=True, kw_only=True)
class CompressesBothWays(Owed):
    """The obligation to exchange the gradient of each stage in so many pieces before its reduction.

    `servers` are the ranks that own the sums; none if the replicas do.
    """

    pieces: tuple[int, ...]
    servers: tuple[int, ...] = ()

    @property
    def facts(self) -> Mapping[str, str]:
        found = {"gradients compressed both ways": f"{', '.join(map(str, self.pieces))} pieces by stage"}
        return found | ({"servers": f"ranks {', '.join(map(str, self.servers))}"} if self.servers else {})


def pieces_of(program: Program) -> Ints:
    """Return the pieces of each stage's gradient, shape (stages,); of no stage without the method."""
    owed = program.obligations.methods.get("clan")
    return np.array(owed.pieces if isinstance(owed, CompressesBothWays) else (), dtype=np.int64)


def all_pieces(program: Program, rows: Ints) -> Places:
    """Return a place for each piece of each reduction's stage."""
    pieces = pieces_of(program)
    if not len(pieces):
        return Places(rows[:0])
    which, part = numbered(pieces[program.columns.stage[rows]])
    return Places(rows[which], {"part": part})


USES = (AddedUses(kinds=("reduce",), reads=(Read(BETWEEN[4], at=all_pieces, consumes=True),)),)
