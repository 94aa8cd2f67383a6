"""Exact moves of one unit: a layer over a cut between stages, a micro-batch to another replica."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.describe.layout import Layout
from weft.moves.edits import layout_move
from weft.moves.job import Job
from weft.moves.layout import shares_of
from weft.moves.move import Edit, Move, Purpose


def _layers(_: Job, layout: Layout) -> Iterator[Edit]:
    """Where the layout cuts its stages itself."""
    counts = layout.layers_per_stage or ()
    for giver in range(len(counts)):
        for taker in (giver - 1, giver + 1):
            if 0 <= taker < len(counts) and counts[giver] > 1:
                words = f"a layer of stage {giver} to stage {taker}"
                yield Edit(words, replace(layout, layers_per_stage=_moved(counts, giver, taker)))


def _micro_batches(job: Job, layout: Layout) -> Iterator[Edit]:
    """Where the layout deals them out itself. Replicas with equal shares are alike: one stands for all."""
    if layout.micro_batches_per_replica is None:
        return
    shares = shares_of(job, layout)
    kinds = sorted({share: place for place, share in enumerate(shares)}.items())
    for share, giver in kinds:
        for _, taker in kinds:
            if giver != taker and share > 1:
                words = f"a micro-batch of replica {giver} to replica {taker}"
                yield Edit(words, replace(layout, micro_batches_per_replica=_moved(shares, giver, taker)))


def _moved(counts: tuple[int, ...], giver: int, taker: int) -> tuple[int, ...]:
    return tuple(count - (place == giver) + (place == taker) for place, count in enumerate(counts))


ONE_UNIT_MOVES: tuple[Move, ...] = (
    layout_move(
        "move a layer",
        _layers,
        Purpose.FASTER,
        otherwise="no neighbour of a stage can take a layer of it",
        summary="One layer of a stage is computed by the stage before or after it.",
        source="Huang et al., GPipe, arXiv 1811.06965, section 2.2",
        verify="gradients equal one process (float64, 1e-9) for stages of any number of layers",
    ),
    layout_move(
        "move a micro-batch",
        _micro_batches,
        Purpose.FASTER,
        otherwise="replicas have equal shares, or one micro-batch each",
        summary="One micro-batch of a replica is computed by another one.",
        source="weft",
        verify="gradients equal one process (float64, 1e-9) for replicas of any number of micro-batches",
    ),
)
