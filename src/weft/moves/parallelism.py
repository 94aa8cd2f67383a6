"""Exact moves along the mesh axes, loops and micro-batches: the same job on another layout of the same ranks.

If a move changes the mesh, stages are balanced again, ranks are in order and shares are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.moves.edits import Edits, layout_move
from weft.moves.layout import shares_of
from weft.moves.move import Edit, Move, Purpose
from weft.moves.sharers import among_replicas

_GPIPE = "Huang et al., GPipe, arXiv 1811.06965"
_DDP = "Li et al., PyTorch Distributed, arXiv 2006.15704"
_MEGATRON = "Shoeybi et al., Megatron-LM, arXiv 1909.08053"
_PTD_P = "Narayanan et al., Megatron-LM, arXiv 2104.04473"
_GSHARD = "Lepikhin et al., GShard, arXiv 2006.16668"
_LLAMA_3 = "Grattafiori et al., Llama 3, arXiv 2407.21783"


def _fewer_replicas(layout: Layout) -> Layout | None:
    """Halve the replicas, which shard states among the remaining ones; return None for an odd `dp`."""
    return None if layout.dp % 2 else among_replicas(replace(layout.regular, dp=layout.dp // 2))


def _edit(layout: Layout, axis: str, changed: Layout) -> Edit:
    words = f"{axis} {getattr(layout, axis)} -> {getattr(changed, axis)}, dp {layout.dp} -> {changed.dp}"
    return Edit(words, changed)


def _doubled(axis: str) -> Edits:
    """Return edits to twice the degree and half the replicas; all stages get the heaviest recomputation."""

    def edits(_: Job, layout: Layout) -> Iterator[Edit]:
        if (fewer := _fewer_replicas(layout)) is not None:
            degree: dict[str, Any] = {axis: 2 * getattr(layout, axis)}
            yield _edit(layout, axis, replace(fewer, **degree))

    return edits


def _halved(axis: str) -> Edits:
    """Return edits to half the degree and twice the replicas."""

    def edits(_: Job, layout: Layout) -> Iterator[Edit]:
        degree = getattr(layout, axis)
        if degree % 2 == 0:
            degrees: dict[str, Any] = {axis: degree // 2, "dp": 2 * layout.dp}
            yield _edit(layout, axis, replace(layout.regular, **degrees))

    return edits


def _more_tensor(job: Job, layout: Layout) -> Iterator[Edit]:
    """Double `tp` while tensor ranks fit on a node; stages keep their recomputation."""
    width = 2 * layout.width
    if all(group.devices % width == 0 for group in job.cluster.groups):
        for edit in _doubled("tp")(job, layout):
            yield replace(edit, layout=edit.layout.recomputing(layout.recomputes))


def _more_experts(_: Job, layout: Layout) -> Iterator[Edit]:
    """Double `ep` and the micro-batches, so that each rank has as many samples."""
    if (fewer := _fewer_replicas(layout)) is not None:
        size = 2 * layout.micro_batch_size
        yield _edit(layout, "ep", replace(fewer, ep=2 * layout.ep, micro_batch_size=size))


def _fewer_experts(_: Job, layout: Layout) -> Iterator[Edit]:
    if layout.ep % 2 == 0 == layout.micro_batch_size % 2:
        size, dp = layout.micro_batch_size // 2, 2 * layout.dp
        yield _edit(layout, "ep", replace(layout.regular, ep=layout.ep // 2, dp=dp, micro_batch_size=size))


def _more_loops(_: Job, layout: Layout) -> Iterator[Edit]:
    more = replace(layout, loops=2 * layout.loops, layers_per_stage=None, recompute_per_stage=None)
    yield Edit(f"loops {layout.loops} -> {more.loops}", more)


def _larger_micro_batch(_: Job, layout: Layout) -> Iterator[Edit]:
    shares = layout.micro_batches_per_replica
    if shares is None or all(share % 2 == 0 for share in shares):
        halved = shares and tuple(share // 2 for share in shares)
        yield _other_size(layout, 2 * layout.micro_batch_size, halved)


def _smaller_micro_batch(_: Job, layout: Layout) -> Iterator[Edit]:
    shares = layout.micro_batches_per_replica
    if layout.micro_batch_size % 2 == 0:
        doubled = shares and tuple(2 * share for share in shares)
        yield _other_size(layout, layout.micro_batch_size // 2, doubled)


def _other_size(layout: Layout, size: int, shares: tuple[int, ...] | None) -> Edit:
    words = f"micro-batch size {layout.micro_batch_size} -> {size}"
    return Edit(words, replace(layout, micro_batch_size=size, micro_batches_per_replica=shares))


_mesh_move = partial(
    layout_move, verify="gradients equal one process (float64, 1e-9) for every (pp, dp) up to four ranks"
)


PARALLELISM_MOVES: tuple[Move, ...] = (
    _mesh_move(
        "smaller micro-batches",
        _smaller_micro_batch,
        Purpose.SMALLER,
        otherwise="the micro-batch size is odd",
        summary="Half the samples per micro-batch: less memory in flight and a smaller bubble.",
        source=_PTD_P,
    ),
    _mesh_move(
        "larger micro-batches",
        _larger_micro_batch,
        otherwise="a replica has an odd number of micro-batches",
        summary="Twice the samples per micro-batch: better kernels, fewer of them to fill the pipeline.",
        source=_PTD_P,
    ),
    _mesh_move(
        "more tensor parallelism",
        _more_tensor,
        Purpose.SMALLER,
        otherwise="the number of replicas is odd, or a node has no room for twice the tensor ranks",
        summary="Every layer divided over twice the ranks, half the replicas.",
        source=_MEGATRON,
    ),
    _mesh_move(
        "less tensor parallelism",
        _halved("tp"),
        otherwise="the number of tensor ranks is odd",
        summary="Every layer divided over half the ranks, twice the replicas.",
        source=_MEGATRON,
    ),
    _mesh_move(
        "more pipeline parallelism",
        _doubled("pp"),
        Purpose.SMALLER,
        otherwise="the number of replicas is odd",
        summary="Twice the pipeline devices, half the replicas.",
        source=_GPIPE,
    ),
    _mesh_move(
        "more data parallelism",
        _halved("pp"),
        otherwise="the number of pipeline devices is odd",
        summary="Twice the replicas, half the pipeline devices.",
        source=_DDP,
    ),
    _mesh_move(
        "more context parallelism",
        _doubled("cp"),
        otherwise="the number of replicas is odd",
        summary="The tokens of every sample divided over twice the ranks, half the replicas.",
        source=_LLAMA_3,
    ),
    _mesh_move(
        "less context parallelism",
        _halved("cp"),
        otherwise="the number of context ranks is odd",
        summary="The tokens of every sample divided over half the ranks, twice the replicas.",
        source=_LLAMA_3,
    ),
    _mesh_move(
        "more expert parallelism",
        _more_experts,
        Purpose.SMALLER,
        otherwise="the number of replicas is odd",
        summary="The experts divided over twice the ranks, each with as many samples, in half the replicas.",
        source=_GSHARD,
    ),
    _mesh_move(
        "less expert parallelism",
        _fewer_experts,
        otherwise="the number of expert ranks is odd",
        summary="The experts divided over half the ranks, each with as many samples, in twice the replicas.",
        source=_GSHARD,
    ),
    _mesh_move(
        "more loops",
        _more_loops,
        otherwise="a schedule without loops",
        summary="Twice the stages per device: a smaller bubble for more messages.",
        source=_PTD_P,
    ),
)


def _layers(_: Job, layout: Layout) -> Iterator[Edit]:
    """Move one layer to a neighbour stage, if the layout has cuts."""
    counts = layout.layers_per_stage or ()
    for giver in range(len(counts)):
        for taker in (giver - 1, giver + 1):
            if 0 <= taker < len(counts) and counts[giver] > 1:
                words = f"a layer of stage {giver} to stage {taker}"
                yield Edit(words, replace(layout, layers_per_stage=_moved(counts, giver, taker)))


def _micro_batches(job: Job, layout: Layout) -> Iterator[Edit]:
    """Move a micro-batch to another replica, if the layout has shares; try one replica per equal share."""
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
