"""Matrix products of blocks with operands in 8 bits, through torchao."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.fp8_linears.costs import OPTION
from weft.methods.fp8_linears.options import NAME, TABLE
from weft.methods.fp8_linears.rules import RULES

BUNDLE = Bundle(name=NAME, parts=(OPTION, TABLE, *RULES), runtime="weft.methods.fp8_linears.runtime")
