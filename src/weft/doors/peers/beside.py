"""A peer's word on the plans that planners simulated, beside weft's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.doors.peers.calculon import Calculon
from weft.doors.peers.said import Question, Said
from weft.planning.comparison import Answer
from weft.planning.planners import Candidate
from weft.planning.problem import Problem
from weft.scoring.metrics import spearman


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A plan that weft simulated, what a peer says of it, and the planners whose best plan it is."""

    candidate: Candidate
    said: Said
    best_of: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """Weft's simulated step."""
        return self.candidate.step_s


@dataclass(frozen=True, kw_only=True)
class Beside:
    """All plans, shortest simulated step first. `always` is what the peer leaves out of every plan."""

    peer: str
    always: tuple[str, ...]
    plans: tuple[Judged, ...]

    @cached_property
    def both(self) -> tuple[Judged, ...]:
        """Those that the peer can say, too."""
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


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A planner's own order of its plans beside the simulator's.

    Attributes:
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


def ranked(answer: Answer) -> Ranked:
    """How a planner with costs of its own ranks its plans."""
    said = [one for one in answer.candidates if one.estimate_s is not None]
    both = [(one.estimate_s, one.prediction.step_s) for one in said if one.prediction is not None]
    costs, steps = np.array(both, dtype=np.float64).reshape(-1, 2).T
    unsaid = Counter(one.reason.partition(" (")[0] for one in answer.candidates if one.estimate_s is None)
    return Ranked(
        peer=answer.planner,
        considered=len(answer.candidates),
        said=len(said),
        simulated=len(both),
        agreement=spearman(costs, steps),
        reasons=tuple(unsaid.most_common()),
    )


def ask_beside(peer: Calculon, problem: Problem, answers: Sequence[Answer]) -> Beside:
    """Ask a peer about every plan that the planners simulated, each once.

    Raises:
        InputError, RunError: as the peer's `say` does.
    """
    known: dict[str, Candidate] = {}
    best: dict[str, list[str]] = {}
    for answer in answers:
        for candidate in answer.simulated:
            assert candidate.plan is not None, "a simulated candidate has a plan"
            known.setdefault(candidate.plan.plan_id, candidate)
        if answer.candidate is not None and answer.candidate.plan is not None:
            best.setdefault(answer.candidate.plan.plan_id, []).append(answer.planner)
    job = problem.job
    questions = [
        Question(model=problem.model, graph=job.graph, cluster=job.cluster, plan=one.plan)
        for one in known.values()
        if one.plan is not None
    ]
    said = peer.say(questions)
    judged = [
        Judged(candidate=candidate, said=one, best_of=tuple(best.get(plan_id, ())))
        for (plan_id, candidate), one in zip(known.items(), said, strict=True)
    ]
    judged.sort(key=lambda one: one.step_s)
    return Beside(peer=peer.name, always=peer.always, plans=tuple(judged))
