"""`explain_text`: another stack's file, its faults, weft's prediction and weft's own plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.describe.layout import PartialLayout
from weft.describe.model import ModelConfig
from weft.describe.prediction import Prediction
from weft.describe.units import format_bytes, format_seconds
from weft.doors.checks import findings
from weft.doors.checks.base import Finding, slow, wrong
from weft.doors.configuration import Configuration
from weft.doors.explain import read_configuration
from weft.doors.implied import (
    Answers,
    Implied,
    PredictedPlan,
    implied,
    known_model,
    on_cluster,
    planned_layout,
    with_answers,
)
from weft.errors import InputError, Violation
from weft.moves.move import Purpose
from weft.planning.neighbours import neighbours
from weft.planning.planned import DEFAULT_PLANNER
from weft.planning.planners import Candidate, get_planner
from weft.planning.planners.bounds import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The meaning of a configuration.

    Attributes:
        missing: missing facts for a prediction, one line each, with the option to give.
        implied, plan: the file's layout, and its plan with a prediction; None where facts are missing or the
            layout cannot run.
        best: weft's own plan on the same cluster with the same batch, precision and model; None where nothing
            is predicted or nothing fits, and where the file's job is not the predicted one.
    """

    configuration: Configuration
    findings: tuple[Finding, ...]
    missing: tuple[Violation, ...] = ()
    implied: Implied | None = None
    plan: PredictedPlan | None = None
    best: Candidate | None = None

    @property
    def overfull_bytes(self) -> int:
        """The fullest device's excess over its memory in bytes: negative if all fits, 0 if unknown."""
        if self.implied is None or self.plan is None:
            return 0
        return self.plan.overfull_bytes(self.implied.problem.job.cluster)

    @property
    def chance_to_fit(self) -> float | None:
        """The probability that the file's layout fits; None if it is unknown."""
        if self.implied is None or self.plan is None:
            return None
        return self.plan.chance_to_fit(self.implied.problem.job.cluster)

    @property
    def gain_s(self) -> float | None:
        """Seconds per step that weft's plan saves by prediction. None without both predictions, or where the
        file's layout does not fit."""
        if self.plan is None or self.best is None or self.overfull_bytes > 0:
            return None
        return self.plan.prediction.step_s - self.best.step_s

    def record(self) -> dict[str, Any]:
        """Return the JSON answer; seconds, bytes and counts, None for unknown values."""
        configuration, needed, best = self.configuration, self.implied, self.best
        return {
            "stack": configuration.stack,
            "keys": dict(sorted(configuration.keys.items())),
            "layout": layout_record(configuration),
            "findings": [
                {"severity": str(found.severity), **asdict(found.violation)} for found in self.findings
            ],
            "unpredicted": list(configuration.unpredicted),
            "not_comparable": list(configuration.incomparable),
            "missing": [str(violation) for violation in self.missing],
            "assumed": list(needed.assumed) if needed else [],
            "predicted": _record(str(needed.layout), self.plan.prediction) if needed and self.plan else None,
            "held": [part._asdict() for part in self.plan.held] if self.plan else [],
            "chance_to_fit": self.chance_to_fit,
            "fits": self.overfull_bytes <= 0 if self.plan else None,
            "weft": _record(best.words, best.prediction) if best and best.prediction else None,
            "gain_s": self.gain_s,
        }


def explain_text(text: str, name: str, answers: Answers, *, search: bool = True) -> Explanation:
    """Explain the text of a configuration; `name` is the file's. Without `search` weft plans nothing itself.

    Raises:
        InputError: when no stack's reader recognises it, a degree in it is no count, or an answer is refused.
    """
    read = on_cluster(read_configuration(text, name), answers)
    configuration = known_model(with_answers(read, answers), answers)
    found = findings(configuration)
    try:
        needed = implied(configuration, answers)
    except InputError as error:
        return Explanation(configuration=configuration, findings=tuple(found), missing=error.violations)
    plan: PredictedPlan | None = None
    try:
        plan = planned_layout(needed.problem, needed.layout, needed.memory)
    except InputError as error:
        refused = (wrong(configuration.stack, one.problem, one.nearest) for one in error.violations)
        said = [str(one) for one in found]
        if any(one.violation.where == configuration.key("global_batch") for one in found):
            refused = (one for one in refused if not one.violation.problem.startswith("global batch "))
        found += [one for one in refused if not any(one.violation.problem in line for line in said)]
    comparable = not configuration.incomparable
    if plan is not None and comparable:
        found += _memory_to_spare(needed, plan)
    best = _best(needed) if search and comparable else None
    return Explanation(
        configuration=configuration, findings=tuple(found), implied=needed, plan=plan, best=best
    )


def layout_record(configuration: Configuration) -> dict[str, Any]:
    """Return the file's layout in weft's words."""
    model = configuration.model
    return {
        "devices": configuration.ranks,
        **configuration.layout.record(),
        "dp": configuration.replicas,
        "micro_batches": configuration.micro_batches,
        "global_batch": configuration.samples_per_step,
        "sequence": configuration.sequence,
        "precision": configuration.precision,
        "reduce_precision": configuration.reduce_precision,
        "launch": None if configuration.launch == "eager" else configuration.launch,
        "blocking": list(configuration.layout.blocking or ()),
        "model": model.name if isinstance(model, ModelConfig) else model,
    }


def _record(layout: str, prediction: Prediction) -> dict[str, Any]:
    return {
        "layout": layout,
        **prediction.step_record,
        "peak_bytes": max(prediction.peak_bytes),
    }


def _memory_to_spare(needed: Implied, plan: PredictedPlan) -> Iterator[Finding]:
    """Yield choices that save memory and cost time, where the same layout fits without them."""
    problem, layout = needed.problem, needed.layout
    for one in neighbours(problem, layout, Purpose.LARGER, Bounds(problem).layer_seconds):
        try:
            other = planned_layout(problem, one.layout, needed.memory)
        except InputError:
            continue
        over = other.overfull_bytes(problem.job.cluster, problem.memory_risk)
        gain_s = plan.prediction.step_s - other.prediction.step_s
        if over > 0 or gain_s <= 0:
            continue
        left = f"{format_bytes(-over)} of memory stay free without it"
        text = f"{left}, and a step takes {format_seconds(gain_s)} less"
        for name, given in PartialLayout.of(layout).given.items():
            if (instead := getattr(one.layout, name)) != given:
                yield slow(name, f"{given}: {text}", str(instead))


def _best(needed: Implied) -> Candidate | None:
    """Return the fastest fitting plan of the planner, in its own search or layer by layer without a pipeline.
    The planner tries the latter when pinned. Many other stacks start from sharded weights."""
    problem, planner = needed.problem, get_planner(DEFAULT_PLANNER)
    layers = len(problem.job.graph.layers)
    alone = [
        problem.pins.replaced(pp=1, schedule=schedule, loops=layers)
        for schedule in ("breadth-first", "hybrid")
    ]
    rankings = [planner.search(replace(problem, pins=pins)) for pins in (problem.pins, *alone)]
    found = [ranking.fitting[0] for ranking in rankings if ranking.fitting]
    return min(found, key=lambda candidate: candidate.step_s, default=None)
