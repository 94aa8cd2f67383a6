"""Bytes of segments around experts: what a micro-batch leaves in them, and what their backward passes take.

A segment begins with the stage's input, with rows at their experts, or with their results. The latter two
have the stream and the sums of shared experts beside them. It keeps these, and runs again from them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from weft.describe.device import PRECISION_BYTES, Device
from weft.methods.expert_exchanges.program import NAME
from weft.predict.cost.compute import StageWork
from weft.predict.cost.keeping import keeping_of
from weft.predict.cost.memory import STEPPED_BYTES
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import kept_by_segments
from weft.program.arrays import Ints

# In the backward pass of attention: the gradients of the stream, of a branch, and of its norm's result.
_GRADIENTS_OF_STREAM = 3.0


def rows_kept(pricing: Pricing) -> Ints:
    """Return the changes of bytes by what crosses borders or lies beside it, for inputs of inner layers."""
    plan, graph = pricing.plan, pricing.model.graph

    def elements(stage: int) -> float:
        shape, (*before, _) = plan.shape(stage), plan.stages[stage].layers
        rows, tokens = graph.amounts("dispatched", shape), graph.amounts("sent", shape)
        mixtures = [layer for layer in plan.stages[stage].layers if rows[layer]]
        # The sums of shared experts are those of all tokens, also where tensor ranks divide the stream.
        beside = sum((1.0 + shape.sequence_parallel) * tokens[layer] for layer in mixtures)
        if plan.stages[stage].recompute == "none":
            return beside
        # Selective recomputation keeps the results of experts where they arrive, not where they are made.
        sides = 2.0 if plan.stages[stage].recompute == "full" else 1.0
        crossed = sum(sides * rows[layer] for layer in mixtures)
        return crossed + beside - sum(tokens[layer] for layer in before)

    return kept_by_segments(pricing, NAME, elements)


class _Piece(NamedTuple):
    """Bytes of a piece of a layer (`weft.predict.cost.keeping.Kept`)."""

    kept: float
    temporaries: float
    inputs: float = 0.0
    products: float = 0.0
    freed_products: float = 0.0

    @property
    def later_temporaries(self) -> float:
        return self.temporaries


class _Mixture(NamedTuple):
    """Bytes of a mixture's pieces, in the order of the backward pass."""

    results: _Piece
    experts: _Piece
    attention: _Piece


def taken_bytes(pricing: Pricing, stage: int, device: Device) -> float:
    """Return the most bytes that a stage's backward segments take beside those that its forward pass left.

    Each makes its own piece of a layer again, so no row is there twice.
    """
    plan, graph, most, freed = pricing.plan, pricing.model.graph, 0.0, 0.0
    keeping, shape = keeping_of(plan.stages[stage].recompute), pricing.placed.shape(stage)
    rows = graph.amounts("dispatched", shape)
    for layer in reversed(plan.stages[stage].layers):
        work = StageWork(pricing.model.compute, graph, (layer,), shape, plan.precision, device)
        if not rows[layer]:
            most = max(most, keeping.taken(work) - freed)
            freed += keeping.left(work)
            continue
        pieces = _mixture(work, layer)
        # The moments of a mixture count what it has freed itself.
        most = max(most, keeping.taken(pieces.results) - freed, keeping.taken(pieces.experts) - freed)
        freed += keeping.left(pieces.results) + keeping.left(pieces.experts)
        most = max(most, keeping.taken(pieces.attention) - freed)
        freed += keeping.left(pieces.attention)
    return most


def _mixture(work: StageWork, layer: int) -> _Mixture:
    graph, shape, element = work.graph, work.shape, PRECISION_BYTES[work.precision]
    rows, tokens, routed = (
        element * graph.amounts(name, shape)[layer] for name in ("dispatched", "sent", "routed_kept")
    )
    # Gate and up are products; the activated gate and its product with up are made again.
    inner = (routed - 2.0 * rows) / 2.0
    # Of the mixture's moments, those of the weights of results tell tensor ranks apart.
    around, inside = (
        replace(
            graph.layers[layer],
            temporaries=tuple(
                one for one in graph.layers[layer].temporaries if (one.divided is None) == within
            ),
        ).temporary_bytes(shape, element, STEPPED_BYTES[work.precision])
        for within in (False, True)
    )
    return _Mixture(
        results=_Piece(kept=rows, inputs=rows, temporaries=around),
        experts=_Piece(kept=routed - rows, inputs=rows, products=inner, temporaries=inside),
        # Its input is made by the piece before, which runs again with it.
        attention=_Piece(
            kept=work.kept - routed,
            products=work.products - rows - inner,
            freed_products=work.freed_products,
            temporaries=_GRADIENTS_OF_STREAM * tokens,
        ),
    )
