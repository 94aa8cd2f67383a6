"""CLAN (Zhong et al., arXiv 2105.07829): two-way compressed sums, piece by piece, on two streams.

Every rank owns an equal share of each piece. It encodes the shares of all owners (`compress`) and sends them
(`push`). Owners decode and add up, and encode the sum (`aggregate`), which all ranks get (`pull`) and decode
(`decompress`). Codecs have a stream of their own. So one piece is on the way while another is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.errors import Violation
from weft.methods.clan.kinds import EXCHANGE, PULL, PUSH, CompressesBothWays
from weft.methods.clan.options import NAME
from weft.methods.clan.pieces import PiecedStages
from weft.methods.clan.verify import check_exchange
from weft.methods.sharding.kinds import REDUCE
from weft.moves.synchronisation import NOBODY
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
_TURNS_LATER = np.array([0, 0, 1, 1, 2], dtype=np.int64)


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
    of, kinds = reductions[which], len(EXCHANGE)
    whole = np.array(stages.piece_bytes, dtype=np.int64)[columns.stage[of]]
    size = whole * (part + 1) // pieces[which] - whole * part // pieces[which]
    # Row (piece, kind), piece after piece.
    rows = len(columns) + np.arange(len(of) * kinds).reshape(len(of), kinds)
    added = Columns.of(
        rows.size,
        kind=np.tile(EXCHANGE, len(of)),
        part=np.repeat(part, kinds),
        bytes=np.repeat(size, kinds),
        **{
            name: np.repeat(getattr(columns, name)[of], kinds)
            for name in ("stage", "rank", "replica", "iteration")
        },
    )
    turn = (part[:, None] + _TURNS_LATER - pieces[which, None] - 2) * kinds + np.arange(kinds)
    makes = is_any_of(columns.kind[edges.source], MAKES_GRADIENTS) & (columns.kind[edges.target] == REDUCE)
    maker, row = join(edges.target[makes], of)
    new = [
        Edges.of(edges.source[makes][maker], rows[row, 0]),
        Edges.of(rows[:, :-1].ravel(), rows[:, 1:].ravel()),
        Edges.of(rows[:, -1], of),
    ]
    return insert(pipeline, added, np.repeat(of, kinds), turn.ravel(), Edges.join(new))


def groups(layout: PipelineLayout, stages: PiecedStages) -> tuple[GroupTable, ...]:
    """Return the groups of all replicas, lane by lane."""
    everyone = [[list(range(layout.replicas))]] * len(layout.stages)
    return (replica_groups((PUSH, PULL), layout, everyone),)


PASS = Pass(
    name=NAME,
    options=PiecedStages.of,
    apply=in_pieces,
    # Blocking may move reductions, which the pieces precede.
    after=("sharding", "blocking"),
    refuse=refuse,
    groups=groups,
    owes=lambda layout, stages: CompressesBothWays(pieces=stages.pieces),
    check=check_exchange,
)
