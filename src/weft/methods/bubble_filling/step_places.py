"""The places of work of every step: in the gaps of all devices of a pipeline, in one time.

A piece that goes through all stages takes, stage by stage, the first gap in which its message has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.methods.bubble_filling.gaps import gaps_of
from weft.methods.bubble_filling.options import options_of, read_step_places, step_places_text
from weft.methods.bubble_filling.step_works import StepRows, StepWork, step_works_of
from weft.methods.bubble_filling.steps import common_step, device_steps
from weft.methods.bubble_filling.work import DeviceStep
from weft.methods.bubble_filling.works import with_options
from weft.program.kinds import SEND_ACTIVATION, STEP, is_compute
from weft.program.passes import PredictStep
from weft.program.program import Program
from weft.timeline.timeline import Timeline


def place_steps(plan: Plan, graph: LayerGraph, predicted: PredictStep) -> Plan:
    """Return the plan with a place for each piece of the works of every step."""
    for work in step_works_of(plan):
        asked = options_of(plan)
        assert asked is not None, "a plan with work in bubbles has its options"
        rows = tuple(work.rows(plan, graph, asked))
        program, bare = predicted(plan)
        pipeline = _Pipeline.of(plan, program, bare.timeline, bare.step_s)
        # All pieces at their latest, only for their seconds.
        trial = _with_places(plan, work, [pipeline.latest(stage, rows) for stage in range(len(plan.stages))])
        seconds = _seconds(*_timed(predicted, trial))
        plan = _with_places(plan, work, pipeline.places(rows, seconds, asked.margin))
    return plan


def _timed(predicted: PredictStep, plan: Plan) -> tuple[Program, Timeline]:
    program, simulation = predicted(plan)
    return program, simulation.timeline


def _with_places(plan: Plan, work: StepWork, behind: Sequence[Sequence[int]]) -> Plan:
    asked = options_of(plan)
    assert asked is not None, "a plan with work in bubbles has its options"
    places = dict(read_step_places(asked.steps, len(plan.stages)))
    places[work.method] = tuple(tuple(one) for one in behind)
    return with_options(plan, steps=step_places_text(places))


# By kind and stage, the most seconds of a piece.
Seconds = Mapping[tuple[int, int], float]


def _seconds(program: Program, timeline: Timeline) -> Seconds:
    """Return the longest seconds of the rows of each kind and stage."""
    found: dict[tuple[int, int], float] = {}
    taken = ((timeline.end_ns - timeline.start_ns) / 1e9).tolist()
    for kind, stage, seconds in zip(timeline.kind.tolist(), timeline.stage.tolist(), taken, strict=True):
        found[kind, stage] = max(found.get((kind, stage), 0.0), seconds)
    return found


@dataclass
class _Gap:
    """Idle time of a device, from the begin of the pipeline's step; `start_s` moves as pieces take it."""

    behind: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class _Pipeline:
    """The steps of the devices of one pipeline.

    Attributes:
        steps: by stage, the step of its device.
        device: by stage, its device.
        stepped: by stage, the place of its optimizer step among the computations; without one, their number.
        edges: of the graph of stages.
        message_s: by edge, the seconds of a message.
        period_s: from one step to the next.
    """

    steps: Sequence[DeviceStep]
    device: Sequence[int]
    stepped: Sequence[int]
    edges: Sequence[tuple[int, int]]
    message_s: Mapping[tuple[int, int], float]
    period_s: float

    @classmethod
    def of(cls, plan: Plan, program: Program, timeline: Timeline, period_s: float) -> _Pipeline:
        """Return the pipeline of all replicas; each gap is the shortest of theirs."""
        of_rank = device_steps(program, timeline)
        ranks = [[copy.ranks[0] for copy in stage.replicas] for stage in plan.stages]
        columns = program.columns
        stepped = []
        for stage, (rank, *_) in enumerate(ranks):
            own = np.flatnonzero((columns.rank == rank) & is_compute(columns.kind))
            ends = np.flatnonzero((columns.kind[own] == STEP) & (columns.stage[own] == stage))
            stepped.append(int(ends[0]) if len(ends) else len(own))
        sends = timeline.kind == SEND_ACTIVATION
        part = columns.part[timeline.position]
        message_s: dict[tuple[int, int], float] = {}
        for stage, consumer, taken_ns in zip(
            timeline.stage[sends].tolist(),
            part[sends].tolist(),
            (timeline.end_ns - timeline.start_ns)[sends].tolist(),
            strict=True,
        ):
            message_s[stage, consumer] = max(message_s.get((stage, consumer), 0.0), taken_ns / 1e9)
        return cls(
            [common_step([of_rank[rank] for rank in some]) for some in ranks],
            [some[0] for some in ranks],
            stepped,
            program.obligations.stage_edges,
            message_s,
            period_s,
        )

    def latest(self, stage: int, rows: Sequence[StepRows]) -> list[int]:
        """Return a place for each piece: before the stage's step where it must be, else behind all."""
        last = len(self.steps[stage].busy) - 1
        return [
            min(last, self.stepped[stage] - 1) if one.before_step else last
            for one in rows
            for _ in range(one.pieces)
        ]

    @cached_property
    def gaps(self) -> Mapping[int, list[_Gap]]:
        """By device, the gaps of its step; the idle time from one step to the next counts once."""
        found = {}
        for device, step in dict(zip(self.device, self.steps, strict=True)).items():
            gaps = [_Gap(*gap) for gap in gaps_of(step)]
            last = len(step.busy) - 1
            over_s = max(0.0, (step.busy[-1].end_s if step.busy else 0.0) - self.period_s)
            kept = []
            for gap in gaps:
                if gap.behind < 0:
                    gap.start_s = max(gap.start_s, over_s)
                if gap.behind == last:
                    gap.end_s = max(gap.start_s, self.period_s)
                if gap.end_s > gap.start_s:
                    kept.append(gap)
            found[device] = kept
        return found

    def places(self, rows: Sequence[StepRows], seconds: Seconds, margin: float) -> list[list[int]]:
        """Return, by stage, the computation behind which each piece of all rows runs."""
        stages = range(len(self.device))
        behind: list[list[int]] = [[] for _ in stages]
        # By stage, the end of its piece before.
        done_s = [0.0] * len(stages)
        for one in rows:
            for _ in range(one.pieces):
                end_s = [0.0] * len(stages)
                for stage in stages:
                    ready_s = done_s[stage]
                    if one.messages is not None:
                        ready_s = max(ready_s, self._arrived_s(stage, end_s))
                    least = behind[stage][-1] if behind[stage] else -1
                    place, end_s[stage] = self._take(
                        stage, least, ready_s, seconds.get((one.kind, stage), 0.0), margin, one.before_step
                    )
                    behind[stage].append(place)
                    done_s[stage] = end_s[stage]
        return behind

    def _arrived_s(self, stage: int, end_s: Sequence[float]) -> float:
        """Return when a stage has all that the stages before it make of a piece."""
        return max(
            (
                end_s[producer]
                + (
                    self.message_s.get((producer, stage), 0.0)
                    if self.device[producer] != self.device[stage]
                    else 0.0
                )
                for producer, consumer in self.edges
                if consumer == stage
            ),
            default=0.0,
        )

    def _take(
        self, stage: int, least: int, ready_s: float, seconds: float, margin: float, before_step: bool
    ) -> tuple[int, float]:
        """Take the first gap that fits and return its place and the end of the piece there.

        A piece that fits nowhere makes the step longer: directly before the stage's step, or behind all.
        """
        until = self.stepped[stage] if before_step else len(self.steps[stage].busy)
        for gap in self.gaps[self.device[stage]]:
            start_s = max(gap.start_s, ready_s)
            if least <= gap.behind < until and start_s + (1 + margin) * seconds <= gap.end_s:
                gap.start_s = start_s + seconds
                return gap.behind, gap.start_s
        last = max(least, min(until, len(self.steps[stage].busy)) - 1)
        step = self.steps[stage].busy
        end_s = max(ready_s, step[last].end_s if 0 <= last < len(step) else 0.0) + seconds
        return last, end_s
