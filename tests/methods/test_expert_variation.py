"""Laws: plans are priced with the busiest expert rank that a job expects, and replays with the real one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from described_decoders import described
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.layout import Layout
from weft.describe.plan import Choice
from weft.methods.expert_balance.imbalance import step_with
from weft.methods.expert_balance.places import busiest, first_places
from weft.methods.expert_balance.program import mixtures
from weft.methods.expert_balance.variation import expected_busiest
from weft.moves.layout import build_plan
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import Problem, problem_of
from weft.predict.predict import predict

EXPERTS = 16
LAYOUT = Layout(pp=2, dp=1, ep=4, loops=1, micro_batch_size=4, schedule="gpipe")


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from([(8, 2), (8, 8), (64, 4), (128, 8)]))
def test_more_variation_and_more_ranks_make_the_busiest_busier(
    one: float, other: float, case: tuple[int, int]
) -> None:
    experts, ranks = case
    low, high = sorted((one, other))
    assert 1.0 <= expected_busiest(low, experts, ranks) <= expected_busiest(high, experts, ranks) <= ranks
    assert expected_busiest(high, experts, 1) == 1.0
    assert expected_busiest(high, experts, ranks // 2) <= expected_busiest(high, experts, ranks)


@pytest.mark.parametrize(("experts", "ranks"), [(8, 2), (16, 4), (64, 8), (128, 128)])
@pytest.mark.parametrize("variation", [0.1, 0.4])
def test_the_busiest_is_as_random_experts_make_it(experts: int, ranks: int, variation: float) -> None:
    random = np.random.default_rng(0)
    drawn = random.normal(size=(2000, experts))
    drawn = (drawn - drawn.mean(axis=1, keepdims=True)) / drawn.std(axis=1, keepdims=True)
    (places,) = first_places(1, experts, ranks)
    seen = np.mean([busiest(loads, places) for loads in 1.0 + variation * drawn])
    # Of what the busiest has more than the mean.
    assert expected_busiest(variation, experts, ranks) - 1.0 == pytest.approx(seen - 1.0, rel=0.08)


def asking(folder: Path, **options: Any) -> Problem:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    described(folder, "mixtral", num_local_experts=EXPERTS, max_position_embeddings=1024, **sizes)
    choice = Choice(name="expert-balance", options={"balance": "global-batch", **options})
    return problem_of(
        model=str(folder), on="8xa100-40gb", global_batch=64, methods=(choice,), launch="captured"
    )


def job_of(problem: Problem, **decided: Any) -> PlannedJob:
    plan = build_plan(problem.job, replace(LAYOUT, **decided), [1.0] * len(problem.job.graph.layers))
    run: Any = SimpleNamespace()
    return PlannedJob(run=run, problem=problem, plan=plan)


def test_plans_are_priced_with_the_busiest_rank_that_is_expected(tmp_path: Path) -> None:
    equal, uneven = asking(tmp_path), asking(tmp_path, variation=0.5)
    job = job_of(uneven)
    places = mixtures(uneven.job.graph)
    step_s = job.prediction.step_s
    assert step_s == step_with(job, dict.fromkeys(places, expected_busiest(0.5, EXPERTS, 4)))
    assert step_s > 1.02 * job_of(equal).prediction.step_s
    assert max(job.prediction.peak_bytes) > max(job_of(equal).prediction.peak_bytes)
    # Recorded loads take the place of the expectation, and are not added to it.
    even = dict.fromkeys(places, 1.0)
    assert step_with(job, even) == step_with(job_of(equal), even) == job_of(equal).prediction.step_s
    # Without expert ranks, nobody waits.
    alone = {"ep": 1, "dp": 4}
    assert job_of(uneven, **alone).prediction.step_s == job_of(equal, **alone).prediction.step_s


def test_a_capacity_limits_the_busiest_rank(tmp_path: Path) -> None:
    full = job_of(asking(tmp_path, variation=0.5, capacity=1.1))
    places = mixtures(full.problem.job.graph)
    assert expected_busiest(0.5, EXPERTS, 4) > 1.1
    assert full.prediction.step_s == step_with(full, dict.fromkeys(places, 1.1))
    # Recorded tokens are those before the capacity.
    assert step_with(full, dict.fromkeys(places, 3.0)) == step_with(full, dict.fromkeys(places, 1.1))
    # Half of the rows are lost, also without expert ranks.
    few, all_rows = (
        job_of(asking(tmp_path, capacity=capacity), ep=1, dp=4).prediction.step_s for capacity in (0.5, 1.0)
    )
    assert few < 0.9 * all_rows


def test_a_search_and_its_plan_have_the_same_prices(tmp_path: Path) -> None:
    problem = asking(tmp_path, variation=0.5)
    job = job_of(problem)
    model = problem.cost_model.of(job.plan)
    assert model is problem.cost_model.of(job.plan)
    assert predict(problem.cost_model, job.plan, job.program).prediction.step_s == job.prediction.step_s
    # Equal layers stay equal, so that each is evaluated once.
    assert len(set(model.graph.alike)) == len(set(problem.job.graph.alike))


def test_equally_busy_experts_are_an_assumption_until_the_job_tells_another(tmp_path: Path) -> None:
    assert "experts.variation" in asking(tmp_path).assumed["experts"]
    assert "experts" not in asking(tmp_path, variation=0.5).assumed
    assert "experts" not in problem_of(model="gpt-1m", on="2xt4", global_batch=4).assumed
