"""The moves between losses: all logits at once, chunks of them, or a fused kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.loss_choice import BY_SIZE, WHOLE, Loss
from weft.methods.loss_kernels.costs import refuse
from weft.moves.edits import layout_move
from weft.moves.move import Edit, Move, Purpose

_HSU = "Hsu et al., Liger Kernel, arXiv 2410.10989, section 3.2"


def _to(job: Job, layout: Layout, loss: Loss) -> Iterator[Edit]:
    """Yield the layout with another loss, where the model's head has one."""
    if layout.loss != loss and refuse(job.graph.layers[-1], BY_SIZE) is None:
        changed = replace(layout, loss=loss, loss_chunk_tokens=None)
        yield Edit(f"loss {layout.loss} -> {loss}", changed)


MOVES: tuple[Move, ...] = (
    layout_move(
        "chunk the loss",
        partial(_to, loss="chunked"),
        Purpose.SMALLER,
        otherwise="the loss is chunked already, or the head has no vocabulary",
        summary="The head's logits exist for some tokens at a time, and leave gradients in their place.",
        source=_HSU,
        verify="loss and gradients equal those of whole logits (float64, 1e-9), for every size of chunks",
        asked_by=("plan.loss", "chunked"),
    ),
    layout_move(
        "fuse the loss",
        partial(_to, loss="fused"),
        otherwise="the loss is fused already, or the head has no vocabulary",
        summary="One kernel makes chunks of logits on a GPU and overwrites them with their gradients.",
        source=_HSU,
        verify="loss and gradients equal those of whole logits, within the precision of the kernel",
        asked_by=("plan.loss", "fused"),
    ),
    layout_move(
        "make all logits at once",
        partial(_to, loss=WHOLE),
        Purpose.FASTER,
        Purpose.LARGER,
        otherwise="the loss makes all logits at once",
        summary="The head makes all logits before their loss, which its backward pass goes back through.",
        source="the default of the field's frameworks",
        verify="gradients equal one process (float64, 1e-9)",
        asked_by=("plan.loss", WHOLE),
    ),
)
