"""CLAN (Zhong et al., arXiv 2105.07829): two-way compressed sums, piece by piece, on two streams.

Every owner has an equal share of each piece. Ranks encode the shares of all owners (`compress`) and send them
(`push`). Owners decode and add up, and encode the sum (`aggregate`), which all ranks get (`pull`) and decode
(`decompress`). Codecs have a stream of their own. So one piece is on the way while another is encoded.

The owners are the replicas themselves, or servers (BytePS-Compress), which take part in the exchanges of all
stages. Equal shares load them equally, and every rank sends to all of them at once. Pushes and pulls then
have a stream each: links carry one piece to the servers while another comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from weft.errors import Violation
from weft.methods.clan.kinds import (
    AGGREGATE,
    EXCHANGE,
    PULL,
    PULL_FROM_SERVERS,
    PUSH,
    PUSH_TO_SERVERS,
    SERVED_EXCHANGE,
    CompressesBothWays,
)
from weft.methods.clan.options import NAME
from weft.methods.clan.order import stages_in_turn
from weft.methods.clan.pieces import PiecedStages
from weft.methods.clan.verify import check_exchange
from weft.methods.sharding.kinds import REDUCE
from weft.moves.synchronisation import NOBODY
from weft.program.arrays import Ints
from weft.program.codes import numbered
from weft.program.kinds import MAKES_GRADIENTS, is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass, replica_groups
from weft.program.passes.insert import insert
from weft.program.places import join
from weft.program.program import Columns, Edges

# In one turn the host issues `compress` and `push` of a piece, `aggregate` and `pull` of the one before, and
# `decompress` of the one before that. So no queue waits for the same piece in another queue at once.
_TURNS_LATER: Ints = np.array([0, 0, 1, 1, 2], dtype=np.int64)
_ORDER: Ints = np.array(EXCHANGE, dtype=np.int64)
_SERVED: Ints = np.array(SERVED_EXCHANGE, dtype=np.int64)
_ON_SERVERS = np.isin(_SERVED, (PUSH_TO_SERVERS, AGGREGATE, PULL_FROM_SERVERS))
_BESIDE_SERVERS = _SERVED != AGGREGATE


def refuse(layout: PipelineLayout, stages: PiecedStages, others: Mapping[str, Any]) -> list[Violation]:
    """Refuse a single replica, and a codec for a piece that no stage has."""
    found = [Violation("sync", NOBODY, "dense")] if layout.replicas == 1 else []
    words = ", ".join(map(str, stages.pieces))
    problem = f"{{}} is none of the {words} pieces by stage"
    return found + [Violation("sync.piece_codecs", problem.format(one)) for one in stages.missing]


def in_pieces(pipeline: LoweredPipeline, layout: PipelineLayout, stages: PiecedStages) -> LoweredPipeline:
    """Put the exchanges of all pieces before every reduction; they wait for its backward passes."""
    columns, edges = pipeline.columns, pipeline.edges
    reductions = np.flatnonzero(columns.kind == REDUCE)
    pieces = np.array(stages.pieces, dtype=np.int64)[columns.stage[reductions]]
    which, part = numbered(pieces)
    of, order, later = reductions[which], _ORDER, _TURNS_LATER
    if layout.servers:
        order, later = _SERVED[_BESIDE_SERVERS], _TURNS_LATER[_BESIDE_SERVERS]
    kinds = len(order)
    # Row (piece, kind), piece after piece.
    rows = len(columns) + np.arange(len(of) * kinds).reshape(len(of), kinds)
    added = Columns.of(
        rows.size,
        kind=np.tile(order, len(of)),
        part=np.repeat(part, kinds),
        bytes=np.repeat(_bytes_of(stages, columns.stage[of], part), kinds),
        **{
            name: np.repeat(getattr(columns, name)[of], kinds)
            for name in ("stage", "rank", "replica", "iteration")
        },
    )
    turn = (part[:, None] + later - pieces[which, None] - 2) * kinds + np.arange(kinds)
    makes = is_any_of(columns.kind[edges.source], MAKES_GRADIENTS) & (columns.kind[edges.target] == REDUCE)
    maker, row = join(edges.target[makes], of)
    new = [
        Edges.of(edges.source[makes][maker], rows[row, 0]),
        Edges.of(rows[:, :-1].ravel(), rows[:, 1:].ravel()),
        Edges.of(rows[:, -1], of),
    ]
    if layout.servers:
        # No queue of pushes is also that of reductions, which replace the encoded gradient.
        new.append(Edges.of(rows[:, 0], of))
    return insert(pipeline, added, np.repeat(of, kinds), turn.ravel(), Edges.join(new))


def _bytes_of(stages: PiecedStages, stage: Ints, part: Ints) -> Ints:
    """Return the bytes of pieces, not encoded."""
    whole = np.array(stages.piece_bytes, dtype=np.int64)[stage]
    pieces = np.array(stages.pieces, dtype=np.int64)[stage]
    found: Ints = whole * (part + 1) // pieces - whole * part // pieces
    return found


def on_servers(pipeline: LoweredPipeline, layout: PipelineLayout, stages: PiecedStages) -> LoweredPipeline:
    """Return the rows of all servers, stage by stage in an order that all devices agree with."""
    kinds = int(_ON_SERVERS.sum())
    order: Ints = np.array(stages_in_turn(pipeline.columns, PUSH_TO_SERVERS), dtype=np.int64)
    which, part = numbered(np.array(stages.pieces, dtype=np.int64)[order])
    stage, place = np.repeat(order[which], kinds), np.repeat(which, kinds)
    turn = (part[:, None] + _TURNS_LATER[_ON_SERVERS]) * kinds + np.arange(kinds)
    issued = np.lexsort((turn.ravel(), place))
    count, ranks = len(issued), np.array(layout.server_ranks, dtype=np.int64)
    columns = Columns.of(
        count,
        kind=np.tile(_SERVED[_ON_SERVERS], len(part))[issued],
        stage=stage[issued],
        part=np.repeat(part, kinds)[issued],
        bytes=np.repeat(_bytes_of(stages, order[which], part), kinds)[issued],
    )
    position = np.empty(count, dtype=np.int64)
    position[issued] = np.arange(count)
    rows = position.reshape(-1, kinds)
    each = np.arange(len(ranks))[:, None] * count
    edges = (each + end.ravel() for end in (rows[:, :-1], rows[:, 1:]))
    copies = Columns.join([columns] * len(ranks))
    return LoweredPipeline(
        replace(copies, rank=np.repeat(ranks, count)), Edges.of(*(end.ravel() for end in edges))
    )


def groups(layout: PipelineLayout, stages: PiecedStages) -> tuple[GroupTable, ...]:
    """Return the groups of all replicas, lane by lane, with all servers: first the ranks that send."""
    everyone = [[list(range(layout.replicas))]] * len(layout.stages)
    servers = tuple(layout.server_ranks)
    if not servers:
        return (replica_groups((PUSH, PULL), layout, everyone),)
    # A server has no replica, -1, and finds the group that all replicas have.
    there = replica_groups((PUSH_TO_SERVERS,), layout, everyone)
    back = replica_groups((PULL_FROM_SERVERS,), layout, everyone)
    return (
        replace(there, groups=tuple((*one, *servers) for one in there.groups)),
        replace(back, groups=tuple((*servers, *one) for one in back.groups)),
    )


PASS = Pass(
    name=NAME,
    options=PiecedStages.of,
    apply=in_pieces,
    # Blocking may move reductions, which the pieces precede.
    after=("sharding", "blocking"),
    refuse=refuse,
    beside=on_servers,
    groups=groups,
    owes=lambda layout, stages: CompressesBothWays(pieces=stages.pieces, servers=tuple(layout.server_ranks)),
    check=check_exchange,
)
