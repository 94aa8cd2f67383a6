"""Calculon's word on the plans that planners simulated, beside weft's: figures, JSON and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from weft.describe.units import format_bytes, format_seconds
from weft.planning.comparison import Answer
from weft.planning.planners import Candidate
from weft.planning.problem import Problem
from weft.scoring.metrics import spearman

from .calculon import Calculon, Question, Said

# Plans of both that no planner has as its best, and reasons why others are left out.
SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class JudgedPlan:
    """A plan that weft simulated, what Calculon says of it, and the planners whose best plan it is."""

    candidate: Candidate
    said: Said
    best_of: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """Weft's simulated step."""
        return self.candidate.step_s

    def as_record(self) -> dict[str, Any]:
        """Plain figures; seconds and bytes, None where Calculon cannot say the plan."""
        plan = self.candidate.plan
        return {
            "plan_id": plan.plan_id if plan is not None else None,
            "layout": self.candidate.words,
            "best_of": list(self.best_of),
            "step_s": self.step_s,
            "peak_bytes": self.candidate.peak_bytes,
            "peer_step_s": self.said.step_s,
            "peer_peak_bytes": self.said.peak_bytes,
            "peer_breakdown": dict(self.said.breakdown),
            "approximated": list(self.said.approximated),
            "reason": self.said.reason,
        }


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """All plans, shortest simulated step first."""

    plans: tuple[JudgedPlan, ...]

    @cached_property
    def both(self) -> tuple[JudgedPlan, ...]:
        """The plans that Calculon can say, too."""
        return tuple(one for one in self.plans if one.said.step_s is not None)

    @property
    def agreement(self) -> float | None:
        """Spearman's correlation of both rankings over these plans; None where there are too few."""
        weft, peer = ([one.step_s for one in self.both], [one.said.step_s for one in self.both])
        return spearman(np.array(weft, dtype=np.float64), np.array(peer, dtype=np.float64))

    @property
    def reasons(self) -> tuple[tuple[str, int], ...]:
        """Why it cannot say the others, and how many they are, the most frequent first."""
        return tuple(Counter(one.said.reason for one in self.plans if one.said.reason).most_common())

    def as_record(self) -> dict[str, Any]:
        return {
            "peer": Calculon.name,
            "leaves_out": list(Calculon.always),
            "asked": len(self.plans),
            "said": len(self.both),
            "spearman": self.agreement,
            "plans": [one.as_record() for one in self.plans],
        }

    def table(self) -> Group:
        """Show the best plan of each planner, the shortest others of both, and a summary."""
        rest = [one for one in self.both if not one.best_of][:SHOWN]
        rows = [one for one in self.plans if one.best_of or any(one is other for other in rest)]
        figures = Table(box=None, pad_edge=False, header_style="dim")
        figures.add_column("", justify="right", no_wrap=True)
        for name in ("step", "peak"):
            for who in ("weft", Calculon.name):
                figures.add_column(f"{name}\n{who}", justify="right", no_wrap=True)
        figures.add_column("\nplan, and remarks", overflow="fold")
        for place, one in enumerate(rows, start=1):
            figures.add_row(str(place), *_cells(one))
        return Group(figures, *map(Text, self._summary()))

    def _summary(self) -> list[str]:
        said = f"{Calculon.name} can say {len(self.both)} of {len(self.plans)} simulated plans"
        return [
            f"{said}: {agreement_text(self.agreement)}",
            *reason_lines(self.reasons),
            f"{Calculon.name} leaves out: {'; '.join(Calculon.always)}",
        ]


def judge(calculon: Calculon, problem: Problem, answers: Sequence[Answer]) -> Judgement:
    """Ask Calculon about every plan that the planners simulated, each once.

    Raises:
        RunError: as `Calculon.say` does.
    """
    known: dict[str, Candidate] = {}
    best: dict[str, list[str]] = {}
    questions = []
    job = problem.job
    for answer in answers:
        for candidate in answer.candidates:
            plan = candidate.plan
            if plan is not None and plan.plan_id not in known:
                known[plan.plan_id] = candidate
                questions.append(
                    Question(model=problem.model, graph=job.graph, cluster=job.cluster, plan=plan)
                )
        if answer.candidate is not None and answer.candidate.plan is not None:
            best.setdefault(answer.candidate.plan.plan_id, []).append(answer.planner)
    judged = [
        JudgedPlan(candidate=candidate, said=said, best_of=tuple(best.get(plan_id, ())))
        for (plan_id, candidate), said in zip(known.items(), calculon.say(questions), strict=True)
    ]
    return Judgement(plans=tuple(sorted(judged, key=lambda one: one.step_s)))


def agreement_text(agreement: float | None) -> str:
    """Say how alike two rankings are."""
    return "too few to compare the order" if agreement is None else f"rank correlation {agreement:.2f}"


def reason_lines(reasons: Sequence[tuple[str, int]]) -> list[str]:
    """List the most frequent reasons why plans cannot be said."""
    return [f"  not {count} of them: {reason}" for reason, count in reasons[:SHOWN]]


def _cells(one: JudgedPlan) -> tuple[str | Text, ...]:
    """Steps and peaks of both, and the plan with remarks on it."""
    said = one.said
    words = Text(one.candidate.words)
    if one.best_of:
        words.append(f" (best of {', '.join(one.best_of)})", style="dim")
    if remarks := said.reason or "; ".join(said.approximated):
        words.append(f"\n{remarks}", style="dim")
    return (
        format_seconds(one.step_s),
        "-" if said.step_s is None else format_seconds(said.step_s),
        format_bytes(one.candidate.peak_bytes),
        "-" if said.peak_bytes is None else format_bytes(said.peak_bytes),
        words,
    )
