"""Loss kernels: the head's product and its cross entropy together, without all logits at once."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.loss_kernels.costs import OPTIONS
from weft.methods.loss_kernels.moves import MOVES
from weft.methods.loss_kernels.rules import RULES

BUNDLE = Bundle(
    name="loss-kernels",
    parts=(*OPTIONS, *MOVES, *RULES),
    runtime="weft.methods.loss_kernels.runtime",
)
