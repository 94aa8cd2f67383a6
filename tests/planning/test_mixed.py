"""Recomputation stage by stage: never worse than alike, it fits, and no stage recomputes more than needed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.describe.layout import Layout, PartialLayout
from weft.describe.plan import RECOMPUTES
from weft.moves.layout import refuse
from weft.planning.compile import compile_plan
from weft.planning.planners import Candidate, Verdict
from weft.planning.planners.bounds import Bounds, LayerBytes
from weft.planning.planners.simulated import simulated
from weft.planning.planners.weft import WeftPlanner
from weft.planning.planners.weft.mixed import MixedSpace, choices
from weft.planning.planners.weft.stages import Way, deal
from weft.planning.problem import Problem, problem_of
from weft.program.verify import verify


def posed(on: str = "4xv100-16gb", *, room: float, model: str = "gpt-1m", **pins: object) -> Problem:
    """A problem on devices with so much room: 0 is what a pipeline of all of them needs to recompute fully,
    1 to recompute nothing."""
    pinned = PartialLayout(**pins)  # type: ignore[arg-type]
    problem = problem_of(model=model, on=on, global_batch=32, precision="fp16", pins=pinned, memory_risk=0.5)
    ranks = problem.job.cluster.ranks
    layout = Layout(pp=ranks, dp=1, loops=1, micro_batch_size=2, schedule="1f1b")
    bounds = Bounds(problem)
    least, most = (bounds.holding(layout.recomputing(word)).total for word in ("full", "none"))
    groups = []
    for group in problem.job.cluster.groups:
        taken = group.device.memory_bytes - group.device.usable_bytes
        memory = round(least + room * (most - least)) + taken
        # A stated reserve has room for communicators.
        device = replace(group.device, memory_bytes=memory, reserve_bytes=taken)
        groups.append(replace(group, device=device))
    cluster = replace(problem.job.cluster, groups=tuple(groups))
    return replace(problem, job=replace(problem.job, cluster=cluster))


def step_s(candidate: Candidate) -> float:
    assert candidate.plan is not None
    assert candidate.prediction is not None
    return candidate.step_s


def best_of(problem: Problem, **knobs: int) -> Candidate | None:
    return next(iter(WeftPlanner(**knobs).search(problem).fitting), None)


def judged(problem: Problem, layout: Layout) -> Candidate:
    asked = Candidate(layout=layout, verdict=Verdict.PRUNED, reason="")
    return simulated(problem, asked, Bounds(problem).layer_seconds(layout))


ON = ("4xv100-16gb", "2xv100-16gb+2xt4")
tight = st.floats(0.0, 1.2)


@given(st.data())
@settings(max_examples=12)
def test_it_is_never_worse_than_stages_that_are_alike(data: st.DataObject) -> None:
    problem = posed(
        data.draw(st.sampled_from(ON)),
        room=data.draw(tight),
        pp=data.draw(st.sampled_from([2, 4, None])),
        tp=1,
        schedule=data.draw(st.sampled_from(["1f1b", "gpipe", "breadth-first", "zb-v", "chimera"])),
        micro_batch_size=2,
    )
    alike, mixed = best_of(problem, mixed=0), best_of(problem)
    if alike is not None:
        assert mixed is not None
        assert step_s(mixed) <= step_s(alike)
        assert alike.layout.recompute_per_stage is None
    if mixed is None or mixed.layout.recompute_per_stage is None:
        return
    require_minimal(problem, mixed)


def require_minimal(problem: Problem, found: Candidate) -> None:
    """The plan fits, and each stage that would recompute less does not fit or is not faster."""
    assert found.plan is not None
    assert verify(compile_plan(found.plan, problem.job.graph)) == []
    assert tuple(stage.recompute for stage in found.plan.stages) == found.layout.recomputes
    words = found.layout.recomputes
    for stage, word in enumerate(words):
        for lighter in RECOMPUTES[: RECOMPUTES.index(word)]:
            other = judged(problem, found.layout.recomputing([*words[:stage], lighter, *words[stage + 1 :]]))
            assert other.verdict is Verdict.TOO_BIG or step_s(other) >= step_s(found)


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (0.1, ("full", "full", "selective", "none")),
        (0.25, ("full", "selective", "none", "none")),
        (0.55, ("full", "none", "none", "none")),
        (0.7, ("selective", "none", "none", "none")),
    ],
)
def test_the_first_stages_of_a_pipeline_recompute_and_the_step_is_shorter(
    room: float, words: tuple[str, ...]
) -> None:
    pins = {"schedule": "1f1b", "pp": 4, "tp": 1, "micro_batch_size": 2}
    problem = posed(room=room, **pins)
    ranking = WeftPlanner().search(problem)
    best, alike = ranking.fitting[0], best_of(problem, mixed=0)
    assert alike is not None
    assert best.layout.recompute_per_stage == words
    assert step_s(best) < 0.95 * step_s(alike)
    assert str(alike.layout) in {str(one.layout) for one in ranking.fitting}
    require_minimal(problem, best)


def test_a_layout_that_the_simulator_finds_too_big_recomputes_more() -> None:
    problem = posed(room=0.5)
    bounds = Bounds(problem)
    space = MixedSpace(problem, bounds)
    keeps = Layout(pp=4, dp=1, loops=1, micro_batch_size=2, schedule="1f1b")
    found = judged(problem, keeps)
    assert found.verdict is Verdict.TOO_BIG
    more = space.with_more(found)
    assert more is not None
    assert judged(problem, more).verdict is Verdict.FITS
    assert more.recomputes[-1] == "none"
    fullest = judged(posed(room=-0.5), keeps.recomputing("full"))
    assert MixedSpace(posed(room=-0.5), bounds).with_more(fullest) is None


schedules = st.sampled_from(["1f1b", "gpipe", "zb-h1", "breadth-first", "depth-first", "zb-v", "chimera"])


@given(schedules, st.sampled_from([2, 4]), st.sampled_from([1, 2]), tight)
@settings(max_examples=30)
def test_every_stage_has_the_lightest_word_that_its_devices_can_hold(
    schedule: str, pp: int, loops: int, room: float
) -> None:
    problem = posed(room=room)
    layout = Layout(
        pp=pp,
        dp=4 // pp,
        loops=loops,
        micro_batch_size=2,
        schedule=schedule,
    )
    assume(refuse(problem.job, layout) is None)
    bounds = Bounds(problem)
    found = MixedSpace(problem, bounds).lightest(layout)

    def fits(one: Layout) -> bool:
        return bounds.holding(one).total <= bounds.largest_memory_bytes

    if found is None:
        assert not any(fits(layout.recomputing(word)) for word in RECOMPUTES)
        return
    assert fits(found)
    for stage, word in enumerate(found.recomputes):
        for lighter in RECOMPUTES[: RECOMPUTES.index(word)]:
            words = (*found.recomputes[:stage], lighter, *found.recomputes[stage + 1 :])
            assert not fits(found.recomputing(words))


@given(st.data())
def test_cuts_and_ways_are_as_short_as_any_of_layers_that_are_alike(data: st.DataObject) -> None:
    layers, stages = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3))
    assume(stages <= layers)
    seconds, left = (1.0, data.draw(st.floats(1.0, 1.6))), (1.0, data.draw(st.floats(0.1, 1.0)))
    taken = (0.0, data.draw(st.floats(0.0, 1.0)))
    ways = [
        Way(
            [np.full(layers, seconds[way])],
            [
                LayerBytes(
                    states=np.ones(layers),
                    left=np.full(layers, left[way]),
                    buffers=np.zeros(layers),
                    taken=np.full(layers, taken[way]),
                )
            ],
        )
        for way in (0, 1)
    ]
    room = np.array(data.draw(st.lists(st.floats(2.0, 12.0), min_size=stages, max_size=stages)))
    kept = np.minimum(stages - np.arange(stages), 4)

    def holds(counts: tuple[int, ...], chosen: tuple[int, ...]) -> bool:
        each = zip(counts, chosen, kept.tolist(), room.tolist(), strict=True)
        return all(
            count * (1.0 + most * left[way]) + taken[way] <= most_bytes
            for count, way, most, most_bytes in each
        )

    def longest(counts: tuple[int, ...], chosen: tuple[int, ...]) -> float:
        return max(count * seconds[way] for count, way in zip(counts, chosen, strict=True))

    legal = [
        (counts, chosen)
        for cut in combinations(range(1, layers), stages - 1)
        for chosen in product((0, 1), repeat=stages)
        if holds(counts := tuple(np.diff([0, *cut, layers]).tolist()), chosen)
    ]
    found = deal(ways, np.zeros((stages, 1), dtype=np.int64), np.arange(stages), room, kept, 4, uneven=False)
    if not legal:
        assert found is None
        return
    assert found is not None
    assert (found.layers_per_stage, found.ways) in legal
    assert longest(found.layers_per_stage, found.ways) == pytest.approx(
        min(longest(*one) for one in legal), rel=1e-6
    )
    for stage, way in enumerate(found.ways):
        lighter = (*found.ways[:stage], 0, *found.ways[stage + 1 :])
        assert way == 0 or not holds(found.layers_per_stage, lighter)


@pytest.mark.parametrize("on", ON)
def test_the_same_question_has_the_same_answer(on: str) -> None:
    problem = posed(on, room=0.4, tp=1, schedule="1f1b")
    one, other = (WeftPlanner().search(problem) for _ in range(2))
    assert [str(item.layout) for item in one.candidates] == [str(item.layout) for item in other.candidates]
    assert any(item.layout.recompute_per_stage is not None for item in one.candidates)


@pytest.mark.parametrize("on", ON)
def test_no_time_is_spent_on_it_after_the_budget(on: str) -> None:
    problem = posed(on, room=0.4, tp=1, schedule="1f1b")
    ranking = WeftPlanner(budget_s=1e-9).search(problem)
    assert ranking.fitting
    assert all(one.layout.recompute_per_stage is None for one in ranking.candidates)


def test_stages_choose_only_where_that_is_open_and_saves_time() -> None:
    problem = posed(room=0.5)
    assert choices(problem) == RECOMPUTES
    assert choices(replace(problem, pins=PartialLayout(recompute="full"))) == ()
    assert choices(replace(problem, minimise="memory")) == ()
    (group,) = problem.job.cluster.groups
    processors = replace(group, device=replace(group.device, synchronous=True))
    cluster = replace(problem.job.cluster, groups=(processors,))
    assert choices(replace(problem, job=replace(problem.job, cluster=cluster))) == ()
    pinned = posed(room=0.4, schedule="1f1b", tp=1, recompute="full")
    ranking = WeftPlanner().search(pinned)
    assert {one.layout.recomputes for one in ranking.candidates} == {
        ("full",) * one.layout.stages for one in ranking.candidates
    }
