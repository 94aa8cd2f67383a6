"""Pieces of a layer between the exchanges of its expert ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.describe.families.transformer import transposed_input, transposed_weight
from weft.describe.layer import Layer, Matmul, PassWork
from weft.describe.layer_pieces import LayerPiece, uncut


def expert_pieces(layer: Layer) -> tuple[LayerPiece, ...]:
    """Cut a layer before its experts and behind them; return one piece of a layer without experts.

    Shared experts belong to the first piece. Memory traffic is split equally, and so are its kernels.
    """
    if not layer.routed:
        return uncut(layer)
    passes = (
        (layer.forward, layer.routed),
        (layer.backward_input, tuple(map(transposed_weight, layer.routed))),
        (layer.backward_weight, tuple(map(transposed_input, layer.routed))),
    )
    return tuple(map(LayerPiece, *(_around(work, routed, layer.routed_share) for work, routed in passes)))


def _around(work: PassWork, routed: Sequence[Matmul], share: float) -> list[PassWork]:
    """Return a pass in three pieces; `share` of its products in `routed` is in the second."""
    inside = [replace(one, count=share * one.count) for one in work.matmuls if one in routed]
    shared = [replace(one, count=(1.0 - share) * one.count) for one in work.matmuls if one in routed]
    first = [*(one for one in work.matmuls if one not in routed), *(one for one in shared if one.count.terms)]
    memory, launched = work.memory * (1.0 / 3.0), work.kernels - len(work.matmuls)
    products: tuple[list[Matmul], ...] = (first, inside, [])
    kernels = (launched * (piece + 1) // 3 - launched * piece // 3 for piece in range(3))
    return [
        PassWork(tuple(each), memory, len(each) + more) for each, more in zip(products, kernels, strict=True)
    ]
