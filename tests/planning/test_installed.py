"""What an installed package adds is planned with: schedules, their options and moves, within the contract."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from installing import register

from weft.describe.contract import Contract
from weft.describe.layout import Layout, PartialLayout
from weft.describe.run_file import run_of_keywords
from weft.moves.layout import build_plan
from weft.planning.advice import SmallestChange, SmallestChanges
from weft.planning.compile import compile_plan
from weft.planning.long_steps import predict_long
from weft.planning.planned import plan_run
from weft.planning.planners import PLANNERS, Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import simulated
from weft.planning.planners.space import layouts
from weft.planning.problem import Problem, problem_of
from weft.planning.what_if import what_if
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict

LAST_IN_FIRST_OUT = "last-in-first-out"


def problem(
    on: str = "4xa100-80gb", *, batch: int = 16, contract: Contract = Contract.EXACT, **pins: Any
) -> Problem:
    asked = {"global_batch": batch, "sequence": 64, "pins": PartialLayout(**pins), "contract": contract}
    return problem_of(model="gpt-1m", on=on, **asked)  # type: ignore[arg-type]


def searched(ranking: Ranking) -> set[tuple[str, int]]:
    return {(one.layout.schedule, int(one.layout.options.get("together", 2))) for one in ranking.candidates}


@pytest.mark.parametrize("planner", ["weft", "homogeneous", "random", "exhaustive"])
def test_planners_search_the_schedules_of_others(weft_example: Path, planner: str) -> None:
    asked = problem(pp=4, dp=1, sharding="zero-0", recompute="none")
    ranking = PLANNERS[planner].search(asked)
    fitting = {one.layout.schedule for one in ranking.fitting}
    assert LAST_IN_FIRST_OUT in {schedule for schedule, _ in searched(ranking)}
    if planner == "exhaustive":
        assert LAST_IN_FIRST_OUT in fitting


def test_processors_run_the_schedules_of_others(weft_example: Path) -> None:
    ranking = PLANNERS["weft"].search(problem("this-machine"))
    assert LAST_IN_FIRST_OUT in {schedule for schedule, _ in searched(ranking)}


def test_a_schedule_is_searched_with_the_options_that_it_names_where_the_contract_admits_it(
    weft_example: Path,
) -> None:
    for contract in Contract:
        found = {
            (one.schedule, int(one.options.get("together", 2)))
            for one in layouts(problem(pp=4, contract=contract))
            if one.schedule == "in-twos"
        }
        admitted = contract >= Contract.UNBIASED
        assert found == ({("in-twos", 2), ("in-twos", 4)} if admitted else set())


def test_options_tell_layouts_apart(weft_example: Path) -> None:
    pinned = problem(pp=4, dp=1, micro_batch_size=1, schedule="in-twos")
    ranking = PLANNERS["weft"].search(pinned)
    names = [str(one.layout) for one in ranking.candidates]
    assert len(names) == len(set(names))
    assert any("in-twos (together 4)" in name for name in names)


# As zb-h1, whose backwards are split, but refuses the short pipelines that planners look at first.
LATE_WEIGHTS = """
from weft.program.schedules.zb_h1 import ZeroBubbleH1


class LateWeights(ZeroBubbleH1):
    name = "late-weights"

    def refuse(self, pipeline, options):
        few = pipeline.micro_batches <= pipeline.devices
        return "late-weights runs more micro-batches than that" if few else super().refuse(pipeline, options)
"""


def one_replica(schedule: str, devices: int = 1, size: int = 1) -> Layout:
    return Layout(pp=devices, dp=1, loops=1, micro_batch_size=size, schedule=schedule)


def test_the_bound_of_an_order_of_others_is_that_of_the_same_order(packages: Path) -> None:
    (packages / "late_weights.py").write_text(LATE_WEIGHTS)
    register(packages, "late-weights", {"weft.schedules": {"late": "late_weights:LateWeights"}})
    bounds = Bounds(problem())
    of = {name: bounds.step_s(one_replica(name, 4)) for name in ("late-weights", "zb-h1", "1f1b")}
    assert of["late-weights"] == of["zb-h1"] < of["1f1b"]


@pytest.mark.parametrize("schedule", [LAST_IN_FIRST_OUT, "in-twos"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_bound_of_a_schedule_of_others_is_below_its_step(
    weft_example: Path, schedule: str, devices: int
) -> None:
    asked, layout = problem(f"{devices}xa100-80gb"), one_replica(schedule, devices, 2)
    bounds = Bounds(asked)
    start = Candidate(layout=layout, verdict=Verdict.PRUNED, reason="")
    judged = simulated(asked, start, bounds.layer_seconds(layout))
    assert judged.plan is not None
    assert judged.prediction is not None
    assert 0.0 < bounds.step_s(layout) <= judged.prediction.step_s
    assert bounds.holding(layout).total <= judged.peak_bytes


def test_a_long_step_of_a_schedule_of_others_is_simulated_whole(weft_example: Path) -> None:
    asked, layout = problem("2xa100-80gb", batch=128), one_replica("in-twos", 2)
    plan = build_plan(asked.job, layout, Bounds(asked).layer_seconds(layout))
    long = predict_long(asked.cost_model, plan).prediction
    whole = predict(
        CostModel(graph=asked.job.graph, cluster=asked.job.cluster), plan, compile_plan(plan, asked.job.graph)
    ).prediction
    assert (long.step_s, long.peak_bytes) == (whole.step_s, whole.peak_bytes)


# More devices than baselines are asked about, in an order that they do not know. They try sizes that are no
# powers of two.
MANY, COUNT = "40xa100-80gb", 40
REPLICAS = {"pp": 1, "tp": 1, "sharding": "zero-0", "recompute": "none", "schedule": "breadth-first"}


def best_size(samples: int, **asked: Any) -> int:
    """Micro-batch size of the best plan where each replica has so many samples."""
    many = problem(MANY, batch=samples * COUNT, **REPLICAS, **asked)
    return PLANNERS["weft"].search(many).fitting[0].layout.micro_batch_size


def test_planners_try_powers_of_two(packages: Path) -> None:
    assert best_size(3) == 1


def test_a_move_of_others_improves_a_plan_and_leaves_pins(weft_example: Path) -> None:
    assert best_size(3) == 3
    assert best_size(3, micro_batch_size=1) == 1


def test_a_move_that_keeps_less_than_the_goal_is_not_tried(weft_example: Path) -> None:
    assert [best_size(5, contract=contract) for contract in Contract] == [1, 1, 5, 5]


def test_what_no_layout_says_is_refused_with_the_move(weft_example: Path) -> None:
    ranking = PLANNERS["weft"].search(problem(contract=Contract.EMPIRICAL))
    reasons = [one.reason for one in ranking.candidates if one.verdict is Verdict.REFUSED]
    assert "move 'sync rounded-to': it changes what no layout says" in reasons
    assert "rounded" in {one.layout.sync for one in ranking.fitting}


def test_another_cluster_is_searched_with_the_moves_of_others(weft_example: Path, tmp_path: Path) -> None:
    run = run_of_keywords(
        model="gpt-1m", on=MANY, global_batch=3 * COUNT, sequence=64, precision=None, pins=REPLICAS
    )
    *_, changed = what_if(plan_run(run), "weft", ["memory 40 GB"], home=tmp_path)
    assert changed.best is not None
    assert changed.best.layout.micro_batch_size == 3


def smallest_change() -> SmallestChange | None:
    """Of a layout without a notch of weft's own: an odd size, one replica, everything recomputed, chunks."""
    asked = problem_of(model="gpt2", on="1xt4", global_batch=135, precision="fp32")
    layout = replace(one_replica("1f1b", size=135).recomputing("full"), loss="chunked")
    return SmallestChanges(asked).of(layout)


def test_a_move_of_others_may_be_the_smallest_change(weft_example: Path) -> None:
    found = smallest_change()
    assert found is not None
    assert found.words == "a third of the micro-batch"
    assert found.candidate.layout.micro_batch_size == 45
    assert found.candidate.verdict is Verdict.FITS


def test_without_it_nothing_fits(packages: Path) -> None:
    assert smallest_change() is None


BROKEN = """
from weft.program.schedules.base import ComputeOrder
from weft.program.schedules.gpipe import GPipe


class Broken(GPipe):
    name = "broken"

    def order(self, pipeline, device, options):
        order = super().order(pipeline, device, options)
        rows = slice(None, None, -1) if {backwards} else slice(0, -1)
        return ComputeOrder(*(column[rows] for column in order))
"""


@pytest.mark.parametrize("backwards", [False, True])
def test_an_order_that_cannot_run_is_refused_and_others_are_planned(packages: Path, backwards: bool) -> None:
    (packages / "broken.py").write_text(BROKEN.format(backwards=backwards))
    register(packages, "broken", {"weft.schedules": {"broken": "broken:Broken"}})
    for pinned in (None, "broken"):
        ranking = PLANNERS["homogeneous"].search(
            problem("2xa100-80gb", pp=2, micro_batch_size=2, schedule=pinned)
        )
        verdicts = {(one.layout.schedule, one.verdict) for one in ranking.candidates if one.plan is not None}
        assert ("broken", Verdict.FITS) not in verdicts
        assert bool(ranking.fitting) == (pinned is None)
