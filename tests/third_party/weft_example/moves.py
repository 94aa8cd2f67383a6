"""Moves of a package of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from weft.describe.contract import Contract
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.moves.job import job_of
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.moves.layout_of_plan import layout_of
from weft.moves.move import Context, Move


def _times(name: str, factor: Fraction, contract: Contract) -> Move:
    """Another size of micro-batches, which planners do not try by themselves."""

    def edited(context: Context) -> Layout | None:
        layout = layout_of(context.plan)
        size = layout.micro_batch_size * factor
        return replace(layout, micro_batch_size=int(size)) if size.denominator == 1 else None

    def applies(context: Context) -> str | None:
        layout = edited(context)
        return "its size is not divisible" if layout is None else refuse(job_of(context), layout)

    def apply(context: Context) -> Plan:
        job, layout = job_of(context), edited(context)
        assert layout is not None
        return build_plan(job, layout, flops_per_layer(job))

    return Move(
        name=name,
        contract=contract,
        summary="Micro-batches of another size.",
        source="an example",
        verify="the same samples",
        applies=applies,
        apply=apply,
    )


def _synchronising(sync: Choice, **asked: tuple[str, str]) -> Move:
    return Move(
        name=f"sync {sync.name}",
        contract=Contract.EMPIRICAL,
        summary="Replicas add gradients of eight bits.",
        source="an example",
        verify="losses stay near those of whole gradients",
        applies=lambda context: "it does already" if context.plan.sync == sync else None,
        apply=lambda context: context.plan.model_copy(update={"sync": sync}),
        **asked,
    )


def moves() -> Sequence[Move]:
    return (
        _times("three times the micro-batch", Fraction(3), Contract.EXACT),
        _times("a third of the micro-batch", Fraction(1, 3), Contract.EXACT),
        _times("five times the micro-batch", Fraction(5), Contract.UNBIASED),
        _synchronising(Choice(name="rounded"), asked_by=("sync.method", "rounded")),
        _synchronising(Choice(name="rounded-to", options={"bits": 4})),
    )
