"""Work of other methods in the bubbles of a pipeline (PipeFisher; Osawa et al., arXiv 2211.14133)."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.bubble_filling.anew import ANEW
from weft.methods.bubble_filling.options import NAME
from weft.methods.bubble_filling.program import PASS
from weft.methods.bubble_filling.report import REPORT
from weft.methods.bubble_filling.rules import RULES
from weft.methods.bubble_filling.table import TABLE

BUNDLE = Bundle(name=NAME, parts=(TABLE, PASS, *REPORT, *RULES, *ANEW))
