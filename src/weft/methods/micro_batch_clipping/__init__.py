"""Micro-batch clipping: gradients of micro-batches get one norm before they are added up.

Wang, arXiv 2408.16204, algorithm 1. No micro-batch can dominate a step. No move adds it, because it changes
the mathematics of a job.
"""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.micro_batch_clipping.costs import COSTS
from weft.methods.micro_batch_clipping.kinds import USES
from weft.methods.micro_batch_clipping.options import NAME, TABLE
from weft.methods.micro_batch_clipping.program import PASS
from weft.methods.micro_batch_clipping.report import SECTION
from weft.methods.micro_batch_clipping.rules import RULES

BUNDLE = Bundle(
    name=NAME,
    parts=(TABLE, PASS, *USES, *COSTS, *RULES, SECTION),
    runtime="weft.methods.micro_batch_clipping.runtime",
)
