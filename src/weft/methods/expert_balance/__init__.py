"""Balance of experts: a loss that asks a mixture's router to choose all experts equally often.

Qiu et al., Demons in the Detail, arXiv 2501.11873. Experts' tokens are counted over a whole step or less.
Only counts cross ranks. No move adds it, because it changes the job's loss.
"""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.expert_balance.costs import COSTS
from weft.methods.expert_balance.kinds import USES
from weft.methods.expert_balance.options import NAME, TABLE
from weft.methods.expert_balance.program import PASS
from weft.methods.expert_balance.report import SECTION
from weft.methods.expert_balance.rules import RULES
from weft.methods.expert_balance.variation import EQUALLY_BUSY, EXPECTED

BUNDLE = Bundle(
    name=NAME,
    parts=(TABLE, PASS, *USES, *COSTS, *RULES, EXPECTED, EQUALLY_BUSY, SECTION),
    runtime="weft.methods.expert_balance.runtime",
)
