"""The activations that recomputing stages keep, the time of recomputation, and its room on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from weft.describe.amount import Shape
from weft.describe.device import Device
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Recompute
from weft.predict.cost.compute import ComputeModel, StageWork
from weft.predict.cost.keeping import Keeping, Kept, Number, Timed, keeping_of
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes, per_place


class Full(Keeping):
    """Full recomputation: layers keep their inputs and run forward again (Chen et al., arXiv 1604.06174)."""

    word = "full"

    def left(self, layers: Kept[Number]) -> Number:
        return layers.inputs

    def made(self, layers: Kept[Number]) -> Number:
        return layers.kept

    def again_s(self, layers: Timed[Number]) -> Number:
        return layers.forward_s


class Selective(Keeping):
    """Selective recomputation: outputs of products stay (Korthikanti et al., arXiv 2205.05198, section 5)."""

    word = "selective"

    def left(self, layers: Kept[Number]) -> Number:
        return layers.inputs + layers.products

    def made(self, layers: Kept[Number]) -> Number:
        return layers.kept - layers.products

    def again_s(self, layers: Timed[Number]) -> Number:
        return layers.without_products_s


def made_again_bytes(
    model: ComputeModel,
    graph: LayerGraph,
    layers: Sequence[int],
    shape: Shape,
    precision: str,
    device: Device,
    recompute: Recompute,
) -> int:
    """Return the recomputed bytes of the largest layer, because layers are recomputed one by one; else 0.

    Raises:
        InputError: as `ComputeModel.stage_times`.
    """
    if recompute == "none":
        return 0
    each = (StageWork(model, graph, (layer,), shape, precision, device) for layer in layers)
    return max(0, *(round(keeping_of(recompute).made(one)) for one in each))


def _again(pricing: Pricing) -> Held:
    """Return the bytes of activations of the one layer that a backward pass recomputes."""
    room = np.zeros(pricing.program.ranks, dtype=np.int64)
    if pricing.program.obligations.purpose != "train":
        return Held(room)
    largest = per_place(pricing, partial(made_again_bytes, pricing.model.compute))
    for index, ranks in enumerate(pricing.placed.ranks_of_stage):
        room[ranks] = np.maximum(room[ranks], largest[index, pricing.placed.device_set_of_rank[ranks]])
    return Held(room)


COSTS = (
    Full(),
    Selective(),
    ResidentBytes(what="the layer that is recomputed", hook=_again),
)
