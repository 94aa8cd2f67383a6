"""Comparison of prediction and measurement, joined by instruction id."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from weft.describe.one_line import one_line
from weft.describe.units import counted, format_seconds
from weft.errors import InputError, Violation
from weft.program.arrays import Floats, Ints
from weft.program.kinds import KINDS, is_compute, kind_words
from weft.program.program import NONE
from weft.timeline.figures import error_text, prediction_error
from weft.timeline.medians import (
    Instructions,
    cycle_of,
    from_step,
    instructions,
    median_by,
    step_times_s,
    typical_step_s,
    waits_s,
)
from weft.timeline.timeline import Timeline, label

WARM_UP_STEPS = 5
PREDICTED = "predicted"
_WORST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One quantity on both sides, in seconds.

    `error` is the relative error of the prediction (inf without a measured time). `change` is from a first
    measurement to a second (inf if the first is 0).
    """

    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return _relative(self.predicted_s, self.measured_s)

    @property
    def change(self) -> float:
        return _relative(self.measured_s, self.predicted_s)


def _relative(value: float, reference: float) -> float:
    if reference:
        return prediction_error(value, reference)
    return math.inf if value else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPair(Pair):
    """Median duration of the instructions of one kind; `stage` is -1 for all stages together.

    `predicted_total_s` and `measured_total_s` sum over the instructions of one step and all ranks. If steps
    differ, they are means over the steps, and `instructions` counts the instructions of all.
    """

    kind: str
    stage: int
    instructions: int
    predicted_total_s: float
    measured_total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPair(Pair):
    """Seconds of a rank's instructions of one kind in one step; if steps differ, the mean over them."""

    rank: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionPair(Pair):
    """Duration of one instruction: predicted, and the median over the measured steps."""

    id: int
    rank: int
    kind: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitPair(Pair):
    """Idle time of a rank's compute stream between its instructions in one step (median)."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Expected and measured times of a step, its instructions and waits.

    Attributes:
        labels: names of the two sides.
        step: seconds per step, from the run's summary if `compare` got it, else medians of
            `weft.timeline.medians.step_times_s`.
        steps, warm_up_steps: numbers of counted measured steps, and of skipped steps before them.
        cycle: number of different steps before they repeat.
        matched, only_predicted, only_measured: counts of instructions.
        kinds, stages: by kind, and by stage and kind for the compute stream.
        ranks: by rank and kind, ascending.
        waits: by rank. worst: the instructions with the largest differences, largest first.
        clock_error_ns: bounds the error of single times; 0 if no accelerator measured them.
    """

    labels: tuple[str, str]
    step: Pair
    steps: int
    warm_up_steps: int
    cycle: int
    matched: int
    only_predicted: int
    only_measured: int
    kinds: tuple[KindPair, ...]
    stages: tuple[KindPair, ...]
    ranks: tuple[RankPair, ...]
    waits: tuple[WaitPair, ...]
    worst: tuple[InstructionPair, ...]
    clock_error_ns: int = 0

    def __repr__(self) -> str:
        sides = zip(self.labels, (self.step.predicted_s, self.step.measured_s), strict=True)
        steps = ", ".join(f"{label} {format_seconds(step_s)}" for label, step_s in sides)
        return one_line(self, f"of {self.matched} instructions: step {steps}")

    @property
    def figure(self) -> str:
        """The name of a pair's figure: `error` of a prediction, or `change` from one run to another."""
        return "error" if self.labels[0] == PREDICTED else "change"

    def figure_of(self, pair: Pair) -> float:
        return pair.error if self.figure == "error" else pair.change

    def record(self) -> dict[str, Any]:
        """Return the comparison as plain data for JSON, with each `id` as sixteen hex digits."""
        return {
            "labels": list(self.labels),
            "predicted_step_s": self.step.predicted_s,
            "measured_step_s": self.step.measured_s,
            self.figure: self.figure_of(self.step),
            "steps": self.steps,
            "warm_up_steps": self.warm_up_steps,
            **({} if self.cycle == 1 else {"cycle": self.cycle}),
            **({"clock_error_ns": self.clock_error_ns} if self.clock_error_ns else {}),
            "matched": self.matched,
            "only_predicted": self.only_predicted,
            "only_measured": self.only_measured,
            "kinds": [asdict(pair) for pair in self.kinds],
            "stages": [asdict(pair) for pair in self.stages],
            "ranks": [asdict(pair) for pair in self.ranks],
            "waits": [asdict(pair) for pair in self.waits],
            "worst": [{**asdict(pair), "id": f"{pair.id:016x}"} for pair in self.worst],
        }

    def text(self) -> str:
        """Return a table for a terminal."""
        first, second = self.labels
        cycle = "" if self.cycle == 1 else f", mean over a cycle of {self.cycle}"
        lines = [
            f"step: {first} {format_seconds(self.step.predicted_s)}, "
            f"{second} {format_seconds(self.step.measured_s)} "
            f"({self.figure} {error_text(self.figure_of(self.step))}), "
            f"median of {counted(self.steps, 'step')} after "
            f"{counted(self.warm_up_steps, 'warm-up step')}{cycle}",
            f"instructions: {self.matched} in both, {self.only_predicted} only in {first}, "
            f"{self.only_measured} only in {second}{self._clock_text}",
            "",
            _row("median per instruction", "count", first, second, self.figure),
        ]
        lines += [self._pair_row(kind_words(pair.kind), str(pair.instructions), pair) for pair in self.kinds]
        lines += [
            self._pair_row(f"stage {pair.stage} {kind_words(pair.kind)}", str(pair.instructions), pair)
            for pair in self.stages
        ]
        lines += ["", _row("waits per step", "", first, second, self.figure)]
        lines += [self._pair_row(f"rank {pair.rank}", "", pair) for pair in self.waits]
        lines += ["", _row("largest differences", "", first, second, self.figure)]
        lines += [self._pair_row(f"rank {pair.rank} {pair.name}", "", pair) for pair in self.worst]
        return "\n".join(lines)

    @property
    def _clock_text(self) -> str:
        if not self.clock_error_ns:
            return ""
        return f"; a device's clock is known to {format_seconds(self.clock_error_ns / 1e9)}"

    def _pair_row(self, label: str, count: str, pair: Pair) -> str:
        sides = format_seconds(pair.predicted_s), format_seconds(pair.measured_s)
        return _row(label, count, *sides, error_text(self.figure_of(pair)))


def _row(label: str, count: str, first: str, second: str, figure: str) -> str:
    return f"{label:<28} {count:>6} {first:>12} {second:>12} {figure:>8}"


def _labels(one: Timeline, two: Timeline) -> tuple[str, str]:
    """Return the names of both sides: two runs of one name are the first and the second."""
    if one.clock == PREDICTED:
        return PREDICTED, "measured"
    return (one.run, two.run) if one.run != two.run else ("first", "second")


def compare(
    predicted: Timeline, measured: Timeline, *, step: Pair | None = None, warm_up: int = WARM_UP_STEPS
) -> Comparison:
    """Compare two timelines; the first may also be another run's measurement.

    The first `warm_up` steps of a measured timeline do not count. Of a timeline without more steps, only the
    last cycle of steps counts. `step` gives known times of whole steps, besides their instructions.

    Raises:
        InputError: when one of them is empty, or they share no instruction.
    """
    one, two = _Side.of(predicted, warm_up), _Side.of(measured, warm_up)
    _, left, right = np.intersect1d(
        one.instructions.id, two.instructions.id, assume_unique=True, return_indices=True
    )
    if not len(left):
        plans = [f"plan {timeline.plan_id} of {timeline.run!r}" for timeline in (predicted, measured)]
        raise InputError(Violation("compare", f"no instruction is in both {' and '.join(plans)}"))
    rows, durations = one.instructions.take(left), two.instructions.duration_s[right]
    everywhere = np.full(len(left), NONE, dtype=np.int64)
    compute, cycle = np.flatnonzero(is_compute(rows.kind)), max(one.cycle, two.cycle)
    return Comparison(
        labels=_labels(predicted, measured),
        step=step or Pair(predicted_s=one.step_s, measured_s=two.step_s),
        steps=two.steps,
        warm_up_steps=two.skipped,
        cycle=cycle,
        matched=len(left),
        only_predicted=len(one.instructions.id) - len(left),
        only_measured=len(two.instructions.id) - len(left),
        kinds=_kind_pairs(rows, durations, everywhere, cycle),
        stages=_kind_pairs(rows.take(compute), durations[compute], rows.stage[compute], cycle),
        ranks=_rank_pairs(rows, durations, cycle),
        waits=_wait_pairs(one.timeline, two.timeline),
        worst=_worst(rows, durations),
        clock_error_ns=max(predicted.clock_error_ns, measured.clock_error_ns),
    )


@dataclass(frozen=True)
class _Side:
    """One timeline without its warm-up."""

    timeline: Timeline
    instructions: Instructions
    step_s: float
    steps: int
    skipped: int
    cycle: int

    @classmethod
    def of(cls, timeline: Timeline, warm_up: int) -> _Side:
        if not len(timeline):
            raise InputError(
                Violation("compare", f"the {timeline.clock} timeline of {timeline.run!r} is empty")
            )
        steps, cycle = np.unique(timeline.step), cycle_of(timeline)
        # A predicted cycle is steady.
        skipped = 0 if timeline.clock == PREDICTED else min(warm_up, len(steps) - cycle)
        counted = from_step(timeline, int(steps[skipped]))
        return cls(
            timeline=counted,
            instructions=instructions(counted),
            step_s=typical_step_s(steps[skipped:].tolist(), step_times_s(counted).tolist(), cycle),
            steps=len(steps) - skipped,
            skipped=skipped,
            cycle=cycle,
        )


def _kind_pairs(rows: Instructions, measured_s: Floats, stage: Ints, cycle: int) -> tuple[KindPair, ...]:
    """Return one pair per (stage, kind), from the instructions of `cycle` steps."""
    code = (stage + 1) * len(KINDS) + rows.kind
    codes, first_median = median_by(code, rows.duration_s)
    _, second_median = median_by(code, measured_s)
    _, index, count = np.unique(code, return_inverse=True, return_counts=True)
    first_total = np.bincount(index, weights=rows.duration_s)
    second_total = np.bincount(index, weights=measured_s)
    return tuple(
        KindPair(
            kind=KINDS[int(entry) % len(KINDS)].name,
            stage=int(entry) // len(KINDS) - 1,
            instructions=int(count[place]),
            predicted_s=float(first_median[place]),
            measured_s=float(second_median[place]),
            predicted_total_s=float(first_total[place]) / cycle,
            measured_total_s=float(second_total[place]) / cycle,
        )
        for place, entry in enumerate(codes)
    )


def _rank_pairs(rows: Instructions, measured_s: Floats, cycle: int) -> tuple[RankPair, ...]:
    """Return one pair per (rank, kind), from the instructions of `cycle` steps."""
    codes, index = np.unique(rows.rank * len(KINDS) + rows.kind, return_inverse=True)
    totals = (np.bincount(index, weights=one) / cycle for one in (rows.duration_s, measured_s))
    return tuple(
        RankPair(
            rank=code // len(KINDS), kind=KINDS[code % len(KINDS)].name, predicted_s=first, measured_s=second
        )
        for code, first, second in zip(codes.tolist(), *(one.tolist() for one in totals), strict=True)
    )


def _wait_pairs(predicted: Timeline, measured: Timeline) -> tuple[WaitPair, ...]:
    ranks, expected = waits_s(predicted)
    other_ranks, happened = waits_s(measured)
    both, left, right = np.intersect1d(ranks, other_ranks, return_indices=True)
    return tuple(
        WaitPair(rank=int(rank), predicted_s=float(first), measured_s=float(second))
        for rank, first, second in zip(both, expected[left], happened[right], strict=True)
    )


def _worst(rows: Instructions, measured_s: Floats) -> tuple[InstructionPair, ...]:
    order = np.argsort(-np.abs(measured_s - rows.duration_s), kind="stable")[:_WORST]
    return tuple(
        InstructionPair(
            id=int(rows.id[row]),
            rank=int(rows.rank[row]),
            kind=KINDS[int(rows.kind[row])].name,
            name=label(int(rows.kind[row]), int(rows.stage[row]), int(rows.micro_batch[row])),
            predicted_s=float(rows.duration_s[row]),
            measured_s=float(measured_s[row]),
        )
        for row in order
    )
