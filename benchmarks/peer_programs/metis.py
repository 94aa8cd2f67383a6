"""Metis' own search (Um et al., USENIX ATC 2024) as a planner: its plans are priced by weft's simulator.

Its program is run on the files of `metis_files` and prints its plans, cheapest first. The first of them
become candidates with its cost as their estimate. Plans that weft cannot say are refused, with reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from weft.describe.layout import Layout
from weft.describe.units import format_seconds
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import rank_by_estimate
from weft.planning.planners.space import require_closed_form
from weft.planning.problem import Problem

from .metis_files import MetisInputs
from .metis_plans import MetisPlan, Translation, read_plans
from .program import PeerProgram

_SCRIPT = "cost_het_cluster.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metis:
    """Metis' program as a planner.

    Attributes:
        program: its clone; another folder is refused.
        most_samples: of a micro-batch of one replica that it may plan.
        kept: how many of its plans, the cheapest, are looked at.
        finalists: how many of them that fit are simulated.
    """

    name: ClassVar[str] = "metis"
    program: PeerProgram
    most_samples: int = 16
    kept: int = 400
    finalists: int = 8

    def __post_init__(self) -> None:
        self.program.require(_SCRIPT)

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Its plans that weft can say, cheapest first."""
        ranking = self.search(problem)
        yield from (one.chain for one in ranking.candidates if one.estimate_s is not None)

    def search(self, problem: Problem) -> Ranking:
        """Run its search, and simulate the first of its plans.

        Raises:
            InputError: for a problem that its program cannot be told.
            RunError: when the program fails, takes too long, or answers what is no answer.
        """
        require_closed_form(problem, self.name)
        inputs = MetisInputs(problem=problem, most_samples=self.most_samples)
        with TemporaryDirectory(prefix="weft-metis-") as name:
            folder = Path(name)
            inputs.write(folder)
            script = str((self.program.root / _SCRIPT).resolve())
            printed = self.program.run([script, *inputs.arguments(folder)], folder)
            plans = read_plans(printed, self.kept)
        return _ranked(inputs, plans, self.finalists)


def _ranked(inputs: MetisInputs, plans: list[MetisPlan], finalists: int) -> Ranking:
    translation = Translation(inputs)
    judged, words = [], {}
    for plan in plans:
        layout, reason, approximated = translation.of(plan)
        estimated = f"estimated {format_seconds(plan.cost_s)}, others less"
        judged.append(
            Candidate(
                layout=layout,
                verdict=Verdict.REFUSED if reason else Verdict.PRUNED,
                reason=reason or estimated,
                estimate_s=None if reason else plan.cost_s,
            )
        )
        words[str(layout)] = approximated
    ranking = rank_by_estimate(inputs.problem, judged, Bounds(inputs.problem), finalists)
    return replace(ranking, candidates=tuple(_with(one, words[one.words]) for one in ranking.candidates))


def _with(candidate: Candidate, approximated: str) -> Candidate:
    words = f"{candidate.reason}; {approximated}" if approximated else candidate.reason
    return replace(candidate, reason=words)
