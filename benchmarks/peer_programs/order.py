"""A planner's own order of its plans beside the simulator's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text

from weft.planning.comparison import Answer
from weft.scoring.metrics import spearman

from .judgement import agreement_text, reason_lines


@dataclass(frozen=True, kw_only=True)
class Order:
    """A planner's ranking by costs of its own.

    Attributes:
        peer: the planner.
        considered, said: its plans that were looked at, and those of them that weft can say.
        simulated: those that were simulated, over which `agreement` is Spearman's correlation of its costs
            and the simulated steps; None where they are too few.
        reasons: why weft cannot say the others, and how many they are, the most frequent first.
    """

    peer: str
    considered: int
    said: int
    simulated: int
    agreement: float | None
    reasons: tuple[tuple[str, int], ...]

    def as_record(self) -> dict[str, Any]:
        return {
            "peer": self.peer,
            "considered": self.considered,
            "said": self.said,
            "simulated": self.simulated,
            "spearman": self.agreement,
            "reasons": dict(self.reasons),
        }

    def table(self) -> Group:
        """Show the number of plans that weft can say, and the agreement of both rankings."""
        return Group(
            Text(f"weft can say {self.said} of the first {self.considered} plans of {self.peer}"),
            *map(Text, reason_lines(self.reasons)),
            Text(f"over the {self.simulated} simulated ones: {agreement_text(self.agreement)}"),
        )


def order_of(answer: Answer) -> Order:
    """Return the order of a planner that answered."""
    said = [one for one in answer.candidates if one.estimate_s is not None]
    both = [(one.estimate_s, one.prediction.step_s) for one in said if one.prediction is not None]
    costs, steps = np.array(both, dtype=np.float64).reshape(-1, 2).T
    unsaid = Counter(one.reason.partition(" (")[0] for one in answer.candidates if one.estimate_s is None)
    return Order(
        peer=answer.planner,
        considered=len(answer.candidates),
        said=len(said),
        simulated=len(both),
        agreement=spearman(costs, steps),
        reasons=tuple(unsaid.most_common()),
    )
