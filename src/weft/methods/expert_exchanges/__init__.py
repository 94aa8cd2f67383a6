"""Exchanges of expert ranks inside mixtures, as instructions that another micro-batch overlaps."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.expert_exchanges import program
from weft.methods.expert_exchanges.costs import COSTS
from weft.methods.expert_exchanges.moves import MOVES
from weft.methods.expert_exchanges.rules import RULES
from weft.planning.segment_report import exchanges_section, exchanges_words

BUNDLE = Bundle(
    name=program.NAME,
    parts=(
        program.PASS,
        *COSTS,
        *RULES,
        *MOVES,
        exchanges_section(program.CUTTER, "Expert exchanges"),
        exchanges_words(program.CUTTER, "Expert exchanges"),
    ),
    runtime="weft.methods.expert_exchanges.runtime",
)
