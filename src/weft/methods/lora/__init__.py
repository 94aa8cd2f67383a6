"""Low-rank adaptation: trained low-rank products beside frozen linear layers (LoRA).

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685. No move adds it, because it
changes what a job trains.
"""

from __future__ import annotations

from weft.bundles import Bundle
from weft.describe.relief import Relief
from weft.methods.lora.costs import COSTS
from weft.methods.lora.layers import ADDED
from weft.methods.lora.options import NAME, TABLE
from weft.methods.lora.rules import RULES

RELIEFS = (
    Relief(words="[lora] rank = 16, which trains low-rank products alone", keys={NAME: {"rank": 16}}),
    Relief(
        words='[lora] rank = 16, base = "nf4", with the frozen layers in 4 bits',
        keys={NAME: {"rank": 16, "base": "nf4"}},
    ),
)

BUNDLE = Bundle(
    name=NAME, parts=(TABLE, ADDED, *COSTS, *RULES, *RELIEFS), runtime="weft.methods.lora.runtime"
)
