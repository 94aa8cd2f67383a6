"""K-FAC: the inverse of their curvature, in Kronecker factors, multiplies gradients of linear layers."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.kfac.costs import COSTS
from weft.methods.kfac.kinds import USES
from weft.methods.kfac.options import NAME, TABLE
from weft.methods.kfac.program import PASS, WORK
from weft.methods.kfac.report import REPORT
from weft.methods.kfac.rules import RULES

BUNDLE = Bundle(
    name=NAME, parts=(TABLE, PASS, WORK, *USES, *COSTS, *RULES, *REPORT), runtime="weft.methods.kfac.runtime"
)
