"""Expert parallelism: ranks that divide the experts of mixtures, and the samples of micro-batches.

The axis `ep` of a mesh, as `tp` and `cp`. Lepikhin et al., GShard, arXiv 2006.16668.
"""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.expert_parallel.rules import RULES

BUNDLE = Bundle(name="expert-parallel", parts=RULES)
