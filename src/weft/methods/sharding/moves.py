"""Exact moves that shard the states of a stage over its replicas (ZeRO)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Sharding
from weft.moves.edits import Edits, layout_move
from weft.moves.move import Edit, Move, Purpose
from weft.moves.sharers import island_on_nodes


def _share_more(sharding: Sharding) -> Edits:
    def edits(_: Job, layout: Layout) -> Iterator[Edit]:
        # The names of sharding levels rise with the sharded tensors.
        if layout.sharding < sharding:
            yield Edit(f"{layout.sharding} -> {sharding}", replace(layout, sharding=sharding))

    return edits


def _whole_weights(_: Job, layout: Layout) -> Iterator[Edit]:
    if layout.sharding == "zero-3":
        yield Edit("zero-3 -> zero-2", replace(layout, sharding="zero-2"))


def _islands(job: Job, layout: Layout) -> Iterator[Edit]:
    """Yield islands of the replicas in a node, if these can be an island."""
    if layout.sharding == "zero-0" or layout.island is not None:
        return
    if (island := island_on_nodes(job.cluster, layout)) is not None:
        yield Edit(f"islands of {island} replicas", replace(layout, island=island))


def _sharding_move(
    name: str,
    edits: Edits,
    *purposes: Purpose,
    otherwise: str,
    summary: str,
    asked_by: tuple[str, str] | None = None,
) -> Move:
    return layout_move(
        name,
        edits,
        *purposes,
        otherwise=otherwise,
        summary=summary,
        source="Rajbhandari et al., ZeRO, arXiv 1910.02054",
        verify="states, gathers and reductions of every rank equal the closed forms of the method",
        asked_by=asked_by,
    )


MOVES: tuple[Move, ...] = (
    _sharding_move(
        "shard optimizer states",
        _share_more("zero-1"),
        Purpose.SMALLER,
        otherwise="the plan already shares them out",
        summary="Every replica keeps and steps its share of optimizer states, and gathers weights after it.",
        asked_by=("plan.sharding", "zero-1"),
    ),
    _sharding_move(
        "shard gradients",
        _share_more("zero-2"),
        Purpose.SMALLER,
        otherwise="the plan already shares them out",
        summary="Replicas also keep only a share of summed gradients, beside buffers for what is computed.",
        asked_by=("plan.sharding", "zero-2"),
    ),
    _sharding_move(
        "shard weights",
        _share_more("zero-3"),
        Purpose.SMALLER,
        otherwise="the plan already shares them out",
        summary="Replicas also keep only a share of weights and gather a stage's before computing with it.",
        asked_by=("plan.sharding", "zero-3"),
    ),
    _sharding_move(
        "keep weights whole",
        _whole_weights,
        Purpose.LARGER,
        otherwise="the plan does not share weights out",
        summary="Replicas keep all weights and gather none, and still share out states and gradients.",
    ),
    layout_move(
        "shard inside nodes",
        _islands,
        otherwise="replicas share nothing out or have islands, or no node holds several of them but not all",
        summary="Replicas share states out inside their node, and add up each share with other nodes.",
        source="Zhao et al., PyTorch FSDP, arXiv 2304.11277; Zhang et al., MiCS, arXiv 2205.00119",
        verify="losses and parameters equal those of one process (float64 1e-9)",
    ),
)
