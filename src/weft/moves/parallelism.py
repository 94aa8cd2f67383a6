"""Exact moves along the mesh axes: the same job on another layout of the same ranks.

Where a move changes the mesh, stages are balanced anew, ranks are in order and shares are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft.describe.contract import Contract
from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.moves.job import job_of
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.moves.layout_of_plan import layout_of
from weft.moves.move import Context, Move

Edit = Callable[[Layout], Layout | None]


def _more_pipeline(layout: Layout) -> Layout | None:
    if layout.dp % 2:
        return None
    return replace(
        layout.regular,
        pp=2 * layout.pp,
        dp=layout.dp // 2,
    )


def _more_data(layout: Layout) -> Layout | None:
    if layout.pp % 2:
        return None
    return replace(
        layout.regular,
        pp=layout.pp // 2,
        dp=2 * layout.dp,
    )


def _more_tensor(layout: Layout) -> Layout | None:
    if layout.dp % 2:
        return None
    return replace(layout.regular, tp=2 * layout.tp, dp=layout.dp // 2)


def _less_tensor(layout: Layout) -> Layout | None:
    if layout.tp % 2:
        return None
    return replace(layout.regular, tp=layout.tp // 2, dp=2 * layout.dp)


def _more_context(layout: Layout) -> Layout | None:
    if layout.dp % 2:
        return None
    return replace(layout.regular, cp=2 * layout.cp, dp=layout.dp // 2)


def _less_context(layout: Layout) -> Layout | None:
    if layout.cp % 2:
        return None
    return replace(layout.regular, cp=layout.cp // 2, dp=2 * layout.dp)


def _more_loops(layout: Layout) -> Layout | None:
    return replace(layout, loops=2 * layout.loops, layers_per_stage=None, recompute_per_stage=None)


def _larger_micro_batch(layout: Layout) -> Layout | None:
    shares = layout.micro_batches_per_replica
    if shares is not None:
        if any(share % 2 for share in shares):
            return None
        shares = tuple(share // 2 for share in shares)
    return replace(layout, micro_batch_size=2 * layout.micro_batch_size, micro_batches_per_replica=shares)


def _smaller_micro_batch(layout: Layout) -> Layout | None:
    if layout.micro_batch_size % 2:
        return None
    shares = layout.micro_batches_per_replica
    if shares is not None:
        shares = tuple(2 * share for share in shares)
    return replace(layout, micro_batch_size=layout.micro_batch_size // 2, micro_batches_per_replica=shares)


def _layout_move(name: str, summary: str, source: str, edit: Edit, odd: str) -> Move:
    def applies(context: Context) -> str | None:
        edited = edit(layout_of(context.plan))
        return odd if edited is None else refuse(job_of(context), edited)

    def apply(context: Context) -> Plan:
        job = job_of(context)
        edited = edit(layout_of(context.plan))
        assert edited is not None, f"{name} was applied although it does not apply: {odd}"
        return build_plan(job, edited, flops_per_layer(job))

    return Move(
        name=name,
        contract=Contract.EXACT,
        summary=summary,
        source=source,
        verify="gradients equal one process (float64, 1e-9) for every (pp, dp) up to four ranks",
        applies=applies,
        apply=apply,
    )


PARALLELISM_MOVES: tuple[Move, ...] = (
    _layout_move(
        "more pipeline parallelism",
        "Twice the pipeline devices, half the replicas.",
        "Huang et al., GPipe, arXiv 1811.06965",
        _more_pipeline,
        "the number of replicas is odd",
    ),
    _layout_move(
        "more data parallelism",
        "Twice the replicas, half the pipeline devices.",
        "Li et al., PyTorch Distributed, arXiv 2006.15704",
        _more_data,
        "the number of pipeline devices is odd",
    ),
    _layout_move(
        "more tensor parallelism",
        "Every layer divided over twice the ranks, half the replicas.",
        "Shoeybi et al., Megatron-LM, arXiv 1909.08053",
        _more_tensor,
        "the number of replicas is odd",
    ),
    _layout_move(
        "less tensor parallelism",
        "Every layer divided over half the ranks, twice the replicas.",
        "Shoeybi et al., Megatron-LM, arXiv 1909.08053",
        _less_tensor,
        "the number of tensor ranks is odd",
    ),
    _layout_move(
        "more context parallelism",
        "The tokens of every sample divided over twice the ranks, half the replicas.",
        "Grattafiori et al., Llama 3, arXiv 2407.21783",
        _more_context,
        "the number of replicas is odd",
    ),
    _layout_move(
        "less context parallelism",
        "The tokens of every sample divided over half the ranks, twice the replicas.",
        "Grattafiori et al., Llama 3, arXiv 2407.21783",
        _less_context,
        "the number of context ranks is odd",
    ),
    _layout_move(
        "more loops",
        "Twice the stages per device: a smaller bubble for more messages.",
        "Narayanan et al., Megatron-LM, arXiv 2104.04473",
        _more_loops,
        "",
    ),
    _layout_move(
        "larger micro-batches",
        "Twice the samples per micro-batch: better kernels, fewer micro-batches to fill the pipeline.",
        "Narayanan et al., Megatron-LM, arXiv 2104.04473",
        _larger_micro_batch,
        "a replica has an odd number of micro-batches",
    ),
    _layout_move(
        "smaller micro-batches",
        "Half the samples per micro-batch: less memory in flight and a smaller bubble.",
        "Narayanan et al., Megatron-LM, arXiv 2104.04473",
        _smaller_micro_batch,
        "the micro-batch size is odd",
    ),
)
