"""A job without some of its devices: what stays, what moves, and what pays."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.layout import DENSE
from weft.describe.plan_file import check_plan, parse_plan_file
from weft.describe.prediction import Prediction
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.planning.compile import compile_plan
from weft.planning.moved_states import MovedStates, holdings
from weft.planning.plan_file_job import moved_job
from weft.planning.planned import decided_file, plan_run
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Candidate, Verdict
from weft.planning.replanning import REPAIR, NextPlan, Replanning, front, paid_after, replan
from weft.program.verify import verify

# One runner plans for all of them.
pytestmark = pytest.mark.xdist_group("replanning")

UNLIKE = "1xv100-16gb+1xa100-40gb+2xt4"


@cache
def planned(on: str = UNLIKE, planner: str = "baechi", **pins: Any) -> PlannedJob:
    return plan_run(
        parse_run(
            {
                "model": {"preset": "candle-uno"},
                "train": {"global_batch": 64},
                "cluster": {"use": on},
                "plan": {"planner": planner, **pins},
            }
        )
    )


@cache
def again(*words: str) -> Replanning:
    return replan(planned(dp=1), words)


def next_plan(moved_bytes: int, seconds: float, step_s: float) -> NextPlan:
    """Return a plan of which only these figures count."""
    prediction = Prediction(
        step_s=step_s,
        step_low_s=step_s,
        step_high_s=step_s,
        first_step_s=step_s,
        peak_bytes=(1,),
        source="drawn",
    )
    candidate = Candidate(verdict=Verdict.FITS, reason="", prediction=prediction)
    moved = MovedStates(received_bytes=(moved_bytes,), lost_bytes=0, seconds=seconds)
    return NextPlan(way="drawn", candidate=candidate, moved=moved)


drawn = st.builds(next_plan, st.integers(0, 9), st.integers(0, 9).map(float), st.integers(1, 9).map(float))


@given(st.lists(drawn, min_size=1, max_size=12))
def test_the_front_has_the_plans_that_no_other_beats(plans: list[NextPlan]) -> None:
    def figures(one: NextPlan) -> tuple[int, float]:
        return one.moved.total_bytes, one.candidate.step_s

    kept = [figures(one) for one in front(plans)]
    every = {figures(one) for one in plans}
    best = {
        one
        for one in every
        if not any(all(a <= b for a, b in zip(o, one, strict=True)) for o in every - {one})
    }
    assert kept == sorted(best)


@given(drawn, drawn)
def test_a_plan_has_paid_at_its_break_even_step_and_not_before(one: NextPlan, other: NextPlan) -> None:
    def spent_s(plan: NextPlan, steps: int) -> float:
        return plan.moved.seconds + steps * plan.candidate.step_s

    if other.candidate.step_s < one.candidate.step_s:
        steps = paid_after(one, other)
        assert spent_s(other, steps) <= spent_s(one, steps)
        assert steps == 0 or spent_s(other, steps - 1) > spent_s(one, steps - 1)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_repair_moves_the_lost_states_and_nothing_else(rank: int) -> None:
    replanning = again(f"device {rank}")
    assert replanning.former_ranks == tuple(other for other in range(4) if other != rank)
    before, graph = planned(dp=1).plan, planned(dp=1).problem.job.graph
    lost = {layer for stage in before.stages if stage.replicas[0].ranks == (rank,) for layer in stage.layers}
    held = holdings(before, graph)
    lost_bytes = sum((last - first) * piece.element_bytes for piece, (first, last) in held[rank].items())
    chosen = replanning.chosen
    assert REPAIR in chosen.way
    assert chosen.moved.total_bytes == chosen.moved.lost_bytes == lost_bytes
    assert chosen.candidate.plan is not None
    home = {
        layer: stage.replicas[0].ranks[0] for stage in chosen.candidate.plan.stages for layer in stage.layers
    }
    for stage in before.stages:
        for layer in {*stage.layers} - lost:
            assert (replanning.former_ranks[home[layer]],) == stage.replicas[0].ranks


def test_every_plan_of_the_front_fits_and_runs() -> None:
    replanning = again("device 2")
    job = replanning.problem.job
    assert len(replanning.front) > 1
    assert replanning.break_even_steps[0] is None
    for one, other in pairwise(replanning.front):
        assert one.moved.total_bytes < other.moved.total_bytes
        assert one.candidate.step_s > other.candidate.step_s
    for one in replanning.front:
        assert one.candidate.plan is not None
        assert check_plan(one.candidate.plan, job.graph, job.cluster) == []
        assert verify(compile_plan(one.candidate.plan, job.graph)) == []


def test_the_written_plan_is_of_the_remaining_devices_and_can_be_planned_again() -> None:
    replanning = again("device 2")
    text = decided_file(replanning.run, replanning.problem, replanning.chosen.candidate).to_json()
    assert '"without": ["device 2"]' in text
    job = moved_job(parse_plan_file(json.loads(text)), None, None)
    assert job.problem.job.cluster == replanning.problem.job.cluster
    further = replan(job, ["device 0"])
    # Ranks 1 and 3 of the whole cluster were 1 and 2 of the plan.
    assert further.former_ranks == (1, 2)
    assert further.run.cluster.without == ("device 2", "device 0")
    with pytest.raises(InputError, match="'device2' is left out already"):
        replan(job, ["device2"])


def test_replicas_that_remain_lose_nothing() -> None:
    before = planned("4xt4", "weft", pp=1, dp=4, sharding="zero-0")
    assert before.plan.sync.name == DENSE
    chosen = replan(before, ["device 1"]).chosen
    assert chosen.moved.total_bytes == 0


def test_shards_of_a_lost_replica_come_from_the_checkpoint() -> None:
    before = planned("4xt4", "weft", pp=1, dp=4, sharding="zero-1")
    held = holdings(before.plan, before.problem.job.graph)
    lost_bytes = sum(
        (last - first) * piece.element_bytes
        for piece, (first, last) in held[1].items()
        if piece.kind == "optimizer"
    )
    assert {one.moved.lost_bytes for one in replan(before, ["device 1"]).front} == {lost_bytes}


@pytest.mark.parametrize(
    ("pins", "words", "line"),
    [
        ({"tp": 2, "pp": 2}, "device 0", "plan: mesh: replicas of 2 ranks: parts of layers are not counted"),
        ({"pp": 4}, "device 4", "'device 4': 4xt4 has devices 0 to 3"),
        ({"pp": 4, "then": {"at_step": 2, "dp": 4}}, "device 0", "plan.then: the plan is to be followed by"),
    ],
)
def test_what_cannot_be_planned_again_is_one_line(pins: dict[str, Any], words: str, line: str) -> None:
    run = {
        "model": {"preset": "gpt-1m"},
        "task": {"data": "python-stdlib"},
        "train": {"global_batch": 8, "precision": "fp32", "steps": 4},
        "cluster": {"use": "4xt4"},
        "plan": {"micro_batch_size": 1, **pins},
    }
    with pytest.raises(InputError, match=line) as refused:
        replan(plan_run(parse_run(run)), [words])
    assert len(refused.value.violations) == 1
