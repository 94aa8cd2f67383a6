"""The check that the ranks that share a stage complete its matrices together.

The values of `kinds` prove that every exchange runs once, and before the step.
"""

from __future__ import annotations

from weft.errors import Violation
from weft.methods.sharding.meeting import outsiders
from weft.methods.whole_matrices.kinds import WHOLE_MATRICES, CompletesMatrices
from weft.program.program import Program


def check_exchanges(program: Program, owed: CompletesMatrices | None) -> list[Violation]:
    """Return the exchanges among other ranks than those that share the stage's gradient."""
    if owed is None:
        return []
    return outsiders(program, WHOLE_MATRICES, "whole matrices")
