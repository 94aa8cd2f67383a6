"""The norm of every micro-batch's own gradient, shown in the report; the training stays the same."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.micro_batch_norms import program
from weft.methods.micro_batch_norms.costs import COSTS
from weft.methods.micro_batch_norms.kinds import USES
from weft.methods.micro_batch_norms.moves import COMPOSITIONS, MOVES
from weft.methods.micro_batch_norms.report import SECTION

BUNDLE = Bundle(
    name=program.NAME,
    parts=(program.PASS, *USES, *COSTS, *COMPOSITIONS, *MOVES, SECTION),
    runtime="weft.methods.micro_batch_norms.runtime",
)
