"""Moves of a package of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from weft.describe.contract import Contract
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Choice
from weft.moves.edits import layout_move
from weft.moves.move import Edit, Move, Purpose


def _times(name: str, factor: Fraction, contract: Contract) -> Move:
    """Another size of micro-batches, which planners do not try by themselves."""

    def edits(_: Job, layout: Layout) -> Iterator[Edit]:
        size = layout.micro_batch_size * factor
        if size.denominator == 1:
            yield Edit(name, replace(layout, micro_batch_size=int(size)))

    return layout_move(
        name,
        edits,
        Purpose.FASTER,
        Purpose.SMALLER,
        otherwise="its size is not divisible",
        contract=contract,
        summary="Micro-batches of another size.",
        source="an example",
        verify="the same samples",
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
