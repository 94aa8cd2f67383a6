"""The windows of a plan: its work, placed into the gaps of its predicted step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import lcm
from typing import NamedTuple

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.methods.bubble_filling.checks import violations
from weft.methods.bubble_filling.options import (
    OPEN,
    BubbleOptions,
    PieceRun,
    PlacerName,
    StageWindow,
    options_of,
    windows_text,
)
from weft.methods.bubble_filling.placement.exact import exact
from weft.methods.bubble_filling.placement.greedy import greedy
from weft.methods.bubble_filling.placement.official import official
from weft.methods.bubble_filling.step_places import place_steps
from weft.methods.bubble_filling.steps import common_step, device_steps
from weft.methods.bubble_filling.work import DeviceStep, Placer, Window, WorkItem
from weft.methods.bubble_filling.works import WorkRows, items_of, with_options
from weft.program.passes import PredictStep
from weft.program.program import NONE, Program
from weft.timeline.timeline import Timeline

_PLACERS: Mapping[PlacerName, Placer] = {"official": official, "weft": greedy, "exact": exact}
# Windows of unlike lengths repeat together after so many times the longest; else all take its length.
_MOST_TOGETHER = 4


class DeviceBubbles(NamedTuple):
    """The step of a device without work, and the items of its stages, (stage, place in the stage's list)."""

    step: DeviceStep
    items: tuple[WorkItem, ...]
    of: tuple[tuple[int, int], ...]


def decide(plan: Plan, graph: LayerGraph, predicted: PredictStep) -> Plan:
    """Return the plan with a window for each stage, if it leaves them open.

    Raises:
        InputError: when the chosen placer breaks a rule of windows.
    """
    asked = options_of(plan)
    if asked is None or asked.windows != OPEN:
        return plan
    plan = place_steps(plan, graph, predicted)
    windows = [StageWindow(1, ())] * len(plan.stages)
    items = [items_of(plan, graph, stage) for stage in range(len(plan.stages))]
    for device in device_work(plan, predicted, items) if any(items) else ():
        placed = place(asked, device)
        for stage in {stage for stage, _ in device.of}:
            windows[stage] = StageWindow(placed.steps, tuple(_runs(device, placed, stage)))
    return with_windows(plan, _together(windows))


def with_windows(plan: Plan, windows: Sequence[StageWindow]) -> Plan:
    """Return a plan that fills bubbles, with these windows."""
    return with_options(plan, windows=windows_text(windows))


def place(asked: BubbleOptions, device: DeviceBubbles) -> Window:
    """Return the window of a device.

    Raises:
        InputError: when the placer breaks a rule of windows.
    """
    placed = _PLACERS[asked.placer](
        device.step, device.items, margin=asked.margin, most_steps=asked.most_steps
    )
    if problems := violations(device.step, device.items, placed):
        reason = f"{asked.placer!r} breaks a rule of windows: {problems[0]}"
        raise InputError(Violation("bubble.placer", reason, "weft"))
    return placed


def device_work(
    plan: Plan, predicted: PredictStep, items: Sequence[Sequence[WorkRows]]
) -> list[DeviceBubbles]:
    """Return the gaps and the work of devices with equal stages; each gap is the shortest of all of them.

    Devices of replicas have equal stages, and so have two of chimera, which run them in the same order.
    The gaps are those of a step without the work. The seconds of work are those of a step with all of it.
    """
    program, bare = predicted(plan)
    steps = device_steps(program, bare.timeline, bare.step_s)
    all_work, full = predicted(with_windows(plan, [StageWindow(1, ())] * len(plan.stages)))
    taken_s = _seconds_of(all_work, full.timeline, plan.stages[0].replicas[0].micro_batches)
    held: dict[int, list[int]] = defaultdict(list)
    for stage, one in enumerate(plan.stages):
        for replica in one.replicas:
            held[replica.ranks[0]].append(stage)
    devices: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, its_stages in held.items():
        devices[tuple(its_stages)].append(rank)
    found = []
    for stages, ranks in devices.items():
        if not any(items[stage] for stage in stages):
            continue
        step = common_step([steps[rank] for rank in ranks])
        found.append(_work_of(plan, step, stages, items, taken_s))
    return found


_Key = tuple[int, int, int, int]


def _seconds_of(program: Program, timeline: Timeline, share: int) -> dict[_Key, float]:
    """Return the longest seconds of work of each kind, stage, part and micro-batch of its replica."""
    columns, position = program.columns, timeline.position
    # Replicas have equal shares, one after the other.
    micro_batch = np.where(columns.micro_batch >= 0, columns.micro_batch % share, NONE)
    found: dict[_Key, float] = defaultdict(float)
    keys = zip(
        *(one[position].tolist() for one in (columns.kind, columns.stage, columns.part, micro_batch)),
        strict=True,
    )
    for key, taken_ns in zip(keys, (timeline.end_ns - timeline.start_ns).tolist(), strict=True):
        found[key] = max(found[key], taken_ns / 1e9)
    return found


def _work_of(
    plan: Plan,
    step: DeviceStep,
    stages: Iterable[int],
    items: Sequence[Sequence[WorkRows]],
    taken_s: Mapping[_Key, float],
) -> DeviceBubbles:
    work: list[WorkItem] = []
    of: list[tuple[int, int]] = []
    for stage in stages:
        first, count = len(work), plan.stages[stage].replicas[0].micro_batches
        numbers = sorted({one.micro_batch for one in step.busy if one.stage == stage and one.ends})
        for place, row in enumerate(items[stage]):
            pieces = range(count) if row.by_micro_batch else (NONE,)
            taken = [taken_s[row.kind, stage, row.part, piece] for piece in pieces]
            work.append(row.behind(first).as_item(stage, taken, numbers))
            of.append((stage, place))
    return DeviceBubbles(step, tuple(work), tuple(of))


def _runs(device: DeviceBubbles, window: Window, stage: int) -> list[PieceRun]:
    """Return a stage's pieces of a window, consecutive ones together."""
    own = [one for one in window.placed if device.of[one.item][0] == stage]
    runs = []
    # Consecutive pieces of one item in one gap have one difference of piece and position.
    numbered = enumerate(own)
    for (step, behind, item, _), some in groupby(
        numbered, lambda pair: (pair[1].step, pair[1].behind, pair[1].item, pair[1].piece - pair[0])
    ):
        pieces = [one.piece for _, one in some]
        runs.append(PieceRun(step, behind, device.of[item][1], pieces[0], len(pieces)))
    return runs


def _together(windows: Sequence[StageWindow]) -> list[StageWindow]:
    longest = max(one.steps for one in windows)
    if lcm(*(one.steps for one in windows)) <= _MOST_TOGETHER * longest:
        return list(windows)
    return [one._replace(steps=longest) for one in windows]
