"""Collectives of tensor ranks inside layers, as instructions that other computations overlap."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.tensor_collectives import program
from weft.methods.tensor_collectives.costs import COSTS
from weft.methods.tensor_collectives.moves import MOVES
from weft.methods.tensor_collectives.rules import RULES
from weft.planning.segment_report import exchanges_section, exchanges_words
from weft.program.segments import USES

BUNDLE = Bundle(
    name=program.NAME,
    parts=(
        program.PASS,
        *USES,
        *COSTS,
        *RULES,
        *MOVES,
        exchanges_section(program.CUTTER, "Tensor collectives"),
        exchanges_words(program.CUTTER, "Tensor collectives"),
    ),
    runtime="weft.methods.tensor_collectives.runtime",
)
