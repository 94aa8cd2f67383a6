"""An auxiliary head behind one block; its loss is added to the model's loss (deep supervision).

Lee et al., Deeply-Supervised Nets, arXiv 1409.5185. No move adds it, because it changes the job's loss.
"""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.auxiliary_head.kinds import USES
from weft.methods.auxiliary_head.layers import ADDED
from weft.methods.auxiliary_head.options import NAME, TABLE
from weft.methods.auxiliary_head.program import PASS
from weft.methods.auxiliary_head.report import SECTION
from weft.methods.auxiliary_head.rules import RULES

BUNDLE = Bundle(
    name=NAME,
    parts=(TABLE, ADDED, PASS, *USES, *RULES, SECTION),
    runtime="weft.methods.auxiliary_head.runtime",
)
