"""Pieces of a layer between the exchanges of its tensor ranks, and the exchanged elements.

A product with divided columns begins a region, a product with a divided inner side ends it (Shoeybi et al.,
Megatron-LM, arXiv 1909.08053). A layer that only looks up rows in a divided table is a region that ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.describe.amount import Amount
from weft.describe.layer import PLAIN_PRODUCT, Layer, PassWork


@dataclass(frozen=True, slots=True)
class TensorBorder:
    """A place in a layer where tensor ranks exchange values.

    Attributes:
        enters: True where a region of divided products begins, False where it ends.
        elements: elements of all tokens' values at this place.
    """

    enters: bool
    elements: Amount


@dataclass(frozen=True, slots=True)
class LayerPiece:
    """The part of a layer's passes between two borders; `divided`: a region of divided products."""

    forward: PassWork
    backward_input: PassWork
    backward_weight: PassWork
    divided: bool = False


class Cut(NamedTuple):
    """A layer's pieces, and the borders between them, one fewer than pieces."""

    pieces: tuple[LayerPiece, ...]
    borders: tuple[TensorBorder, ...]


class _Plan(NamedTuple):
    """For each piece, the positions of its plain products, and True if it is a region; then the borders."""

    products: list[list[int]]
    divided: list[bool]
    borders: list[TensorBorder]


def cut_of(layer: Layer) -> Cut:
    """Cut a layer at its borders; return one piece if its tensor ranks exchange nothing."""
    planned = _planned(layer)
    if not planned.borders:
        return Cut(uncut(layer), ())
    parts = (_parts(one, planned) for one in (layer.forward, layer.backward_input, layer.backward_weight))
    pieces = map(LayerPiece, *parts, planned.divided)
    return Cut(tuple(pieces), tuple(planned.borders))


def uncut(layer: Layer) -> tuple[LayerPiece]:
    """Return a layer as one piece."""
    return (LayerPiece(layer.forward, layer.backward_input, layer.backward_weight),)


def _planned(layer: Layer) -> _Plan:
    products = [one for one in layer.forward.matmuls if one.kernel == PLAIN_PRODUCT]
    if not layer.tensor_reduced.terms:
        return _Plan([], [], [])
    if not products:
        # The layer counts half an exchange forward and half backward; in fact there is one.
        return _Plan([[], []], [True, False], [TensorBorder(False, 2.0 * layer.tensor_reduced)])
    found = _Plan([[]], [False], [])
    for place, product in enumerate(products):
        if _is_divided(product.columns) and not found.divided[-1]:
            _begin(found, TensorBorder(True, product.rows * product.inner))
        found.products[-1].append(place)
        if _is_divided(product.inner):
            _begin(found, TensorBorder(False, product.rows * product.columns))
    return found


def _begin(planned: _Plan, border: TensorBorder) -> None:
    planned.borders.append(border)
    planned.products.append([])
    planned.divided.append(border.enters)


def _is_divided(side: Amount) -> bool:
    return any(term.tensor for term in side.terms)


def _parts(work: PassWork, planned: _Plan) -> list[PassWork]:
    """Cut a pass into pieces: products at their place, kernels of attention in the first region.
    Memory traffic is split equally: the divided part over regions, the rest over the other pieces."""
    pieces = len(planned.divided)
    plain = [one for one in work.matmuls if one.kernel == PLAIN_PRODUCT]
    others = [one for one in work.matmuls if one.kernel != PLAIN_PRODUCT]
    first = planned.divided.index(True)
    launched = work.kernels - len(work.matmuls)
    found = []
    for piece, places in enumerate(planned.products):
        matmuls = [plain[place] for place in places if place < len(plain)]
        matmuls += others if piece == first else []
        kernels = launched * (piece + 1) // pieces - launched * piece // pieces
        memory = _memory(work.memory, planned.divided, piece)
        found.append(PassWork(tuple(matmuls), memory, len(matmuls) + kernels))
    return found


def _memory(memory: Amount, divided: Sequence[bool], piece: int) -> Amount:
    inside, own = sum(divided), divided[piece]
    terms = tuple(term for term in memory.terms if bool(term.tensor) == own)
    return Amount(terms) * (1.0 / (inside if own else len(divided) - inside))
