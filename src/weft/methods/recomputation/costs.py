"""The activations that recomputing stages keep and make again, and the time of recomputation."""

from __future__ import annotations

from typing import cast

import numpy as np

from weft.predict.cost.keeping import Keeping, Kept, Number, Timed


class Full(Keeping):
    """Full recomputation: layers keep their inputs and run forward again (Chen et al., arXiv 1604.06174)."""

    word = "full"

    def left(self, layers: Kept[Number]) -> Number:
        return layers.inputs

    def made(self, layers: Kept[Number]) -> Number:
        return layers.kept - layers.inputs

    def taken(self, layers: Kept[Number]) -> Number:
        # Tensor ranks gather the gradient of a layer's output before the layer runs again.
        first, again = layers.temporaries, self.made(layers) + layers.later_temporaries
        most = np.where(first > layers.later_temporaries, np.maximum(first, again), again)
        return cast("Number", most)

    def again_s(self, layers: Timed[Number]) -> Number:
        return layers.forward_s


class Selective(Keeping):
    """Selective recomputation: outputs of products stay (Korthikanti et al., arXiv 2205.05198, section 5)."""

    word = "selective"

    def left(self, layers: Kept[Number]) -> Number:
        return layers.inputs + layers.products

    def made(self, layers: Kept[Number]) -> Number:
        return layers.kept - layers.inputs - layers.products + layers.freed_products

    def again_s(self, layers: Timed[Number]) -> Number:
        return layers.without_products_s


COSTS = (Full(), Selective())
