"""The drift of measured times from those for which work is placed, by kind, stage and rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.methods.bubble_filling.options import NAME
from weft.planning.compile import compile_plan
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.predict.predict import predict_priced
from weft.predict.simulator import Simulation
from weft.program.arrays import Floats, Ints
from weft.program.kinds import KINDS, is_any_of, is_compute, kind_words
from weft.program.passes import PredictStep
from weft.program.program import Program
from weft.timeline.medians import median_by
from weft.timeline.timeline import Timeline


class InstructionPlace(NamedTuple):
    """The instructions of one kind, by name, of a stage on a rank."""

    kind: str
    stage: int
    rank: int

    def __str__(self) -> str:
        return f"{kind_words(self.kind)} of stage {self.stage} on rank {self.rank}"


# Measured over predicted seconds; 1 where a place is missing.
Factors = Mapping[InstructionPlace, float]
_FACTOR = re.compile(r"(\w+)\.(-1|\d+)\.(\d+)=(\d+(?:\.\d+)?(?:e[+-]\d+)?)", re.ASCII)


def factors_text(factors: Factors) -> str:
    """Return factors as a plan's option: kind, stage, rank and factor, with three digits."""
    each = (f"{one.kind}.{one.stage}.{one.rank}={factor:.3g}" for one, factor in sorted(factors.items()))
    return " ".join(each)


def read_factors(text: str) -> Factors:
    """Return the factors of a plan's option.

    Raises:
        InputError: for a text of another form.
    """
    found: dict[InstructionPlace, float] = {}
    for one in text.split():
        match = _FACTOR.fullmatch(one)
        factor = 0.0 if match is None else float(match[4])
        if match is None or not 0.0 < factor < float("inf"):
            problem = f"{one[:40]!r} is no factor of the form kind.stage.rank=1.5"
            raise InputError(Violation(f"plan: methods: {NAME}: measured", problem))
        found[InstructionPlace(match[1], int(match[2]), int(match[3]))] = factor
    return found


def compared(
    predicted: Timeline, measured: Timeline, work: Sequence[int]
) -> Mapping[InstructionPlace, tuple[float, float]]:
    """Return the predicted and the measured seconds of the same instructions, by place.

    Computations count, and work, which may have other streams. An instruction counts in steps in which it
    takes time. A pass of an evaluation that is not due takes none.

    Args:
        predicted: a cycle of the program.
        measured: steps of it.
        work: codes of the kinds of work.
    """
    expected, taken = (_seconds(one, work) for one in (predicted, measured))
    found: dict[InstructionPlace, tuple[float, float]] = {}
    for key in sorted(expected.keys() & taken.keys()):
        (place, expected_s), (_, taken_s) = expected[key], taken[key]
        before = found.get(place, (0.0, 0.0))
        found[place] = before[0] + expected_s, before[1] + taken_s
    return found


def measured_factors(
    predicted: Timeline, measured: Timeline, work: Sequence[int], margin: float, before: Factors
) -> Factors:
    """Return the factors that leave the margin around 1, of computations and of work.

    Args:
        predicted: a cycle of the program.
        measured: steps of it.
        work: codes of the kinds of work.
        margin: the share by which times may differ.
        before: the former factors, for places without measured times.
    """
    # The text of a plan has three digits, and work is placed by that.
    now = {
        place: float(f"{taken_s / expected_s:.3g}")
        for place, (expected_s, taken_s) in compared(predicted, measured, work).items()
    }
    return {place: one for place, one in {**before, **now}.items() if leaves(one, margin)}


def leaves(factor: float, margin: float) -> bool:
    """Return True if times in this proportion differ by more than the margin."""
    return max(factor, 1.0 / factor) > 1.0 + margin


def drifted(now: Factors, before: Factors, margin: float) -> list[tuple[InstructionPlace, float]]:
    """Return the places that leave the margin around their former times, and by which factor; most first."""
    ratios = ((one, now.get(one, 1.0) / before.get(one, 1.0)) for one in now.keys() | before.keys())
    found = [(place, ratio) for place, ratio in ratios if leaves(ratio, margin)]
    return sorted(found, key=lambda one: (-max(one[1], 1.0 / one[1]), one[0]))


def predicted_with(factors: Factors, model: CostModel, graph: LayerGraph) -> PredictStep:
    """Return the predictor of a plan's program and step, in which instructions take factors of their times.

    Messages and collectives that are no work of bubbles keep their predicted times.
    """
    codes = {one.name: code for code, one in enumerate(KINDS)}
    # What another version of weft called otherwise counts as predicted.
    known = {
        (codes[one.kind], one.stage, one.rank): factor for one, factor in factors.items() if one.kind in codes
    }

    def predicted(plan: Plan) -> tuple[Program, Simulation]:
        program = compile_plan(plan, graph)
        priced = price(model, program, plan)
        occupancy = np.rint(priced.costs.occupancy * _factors_of(program, known)).astype(np.int64)
        priced = replace(priced, costs=replace(priced.costs, occupancy=occupancy))
        return program, predict_priced(program, priced).simulation

    return predicted


def _factors_of(program: Program, known: Mapping[tuple[int, int, int], float]) -> Floats:
    """Return the factor of each row of a program."""
    columns, found = program.columns, np.ones(len(program))
    for (kind, stage, rank), factor in known.items():
        found[(columns.kind == kind) & (columns.stage == stage) & (columns.rank == rank)] = factor
    return found


def _seconds(timeline: Timeline, work: Sequence[int]) -> dict[int, tuple[InstructionPlace, float]]:
    """Return, by id, the place and the median seconds of computations and of work that took any time."""
    taken_ns: Ints = timeline.end_ns - timeline.start_ns
    rows = np.flatnonzero((is_compute(timeline.kind) | is_any_of(timeline.kind, work)) & (taken_ns > 0))
    ids, first = np.unique(timeline.id[rows], return_index=True)
    seconds = median_by(timeline.id[rows], taken_ns[rows])[1] / 1e9
    places = zip(
        *(one[rows][first].tolist() for one in (timeline.kind, timeline.stage, timeline.rank)), strict=True
    )
    named = (InstructionPlace(KINDS[kind].name, stage, rank) for kind, stage, rank in places)
    return dict(zip(ids.tolist(), zip(named, seconds.tolist(), strict=True), strict=True))
