"""Plans follow the optimizer that the run file names: what fits, what may be shared out, what is assumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import run as weft
from weft.describe.optimizers import MOMENTUM_SGD, PLAIN_SGD
from weft.describe.plan import GRADIENT_NORM, Plan
from weft.describe.plan_subject import subject_of
from weft.describe.run_file import RunFile, parse_run
from weft.errors import InputError, Violation
from weft.planning.planned import plan_run, planned_for
from weft.planning.planned_job import PlannedJob
from weft.planning.planners.bounds import Bounds
from weft.planning.problem import problem_of_run
from weft.predict.cost.memory import ALLOCATOR_SLACK

# 1.2 billion parameters: 20 GB of weights, gradients and AdamW's states in fp32, and 10 GB without states.
MODEL, DEVICE = "llama-1b", "1xt4"
SMALL = {"model": "gpt2", "on": "4xa100-80gb"}
OWN = "own_optimizers:SignMomentum"


def run_with(optimizer: dict[str, Any], *, model: str = MODEL, on: str = DEVICE, **plan: Any) -> RunFile:
    return parse_run(
        {
            "model": {"preset": model},
            "task": {"sequence": 128},
            "train": {"global_batch": 8, "precision": "fp32"},
            "optimizer": optimizer,
            "cluster": {"use": on},
            "plan": plan,
        }
    )


def uncounted(optimizer: dict[str, Any], plan: Plan) -> list[Violation]:
    """Return the numbers of a run's optimizer that a plan does not count."""
    return planned_for(subject_of(run_with(optimizer, **SMALL)), plan).uncounted


def planned(optimizer: dict[str, Any], **asked: Any) -> PlannedJob:
    return plan_run(run_with(optimizer, planner="homogeneous", **asked))


def test_sgd_fits_where_adamw_does_not() -> None:
    with pytest.raises(InputError, match="no layout fits"):
        planned({"name": "adamw"})
    with pytest.raises(InputError, match="no layout fits"):
        planned({"name": "sgd"})
    found = planned({"name": "sgd", "momentum": 0.0})
    assert found.plan.optimizer == PLAIN_SGD
    assert found.prediction is not None
    assert max(found.prediction.peak_bytes) < 16e9


def test_the_command_plans_with_the_optimizer_of_the_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(run_with({"name": "sgd", "momentum": 0.0}).to_toml())
    assert weft(["plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"][0]["verdict"] == "fits"
    file.write_text(run_with({}).to_toml())
    assert weft(["plan", str(file)]) == 2
    assert "no layout fits" in capsys.readouterr().err


@pytest.mark.parametrize("planner", ["weft", "homogeneous", "megatron"])
def test_every_planner_counts_another_packages_optimizer(planner: str) -> None:
    found = plan_run(run_with({"name": OWN}, planner=planner, **SMALL))
    same = plan_run(run_with({"name": "sgd"}, planner=planner, **SMALL))
    assert found.plan.optimizer == MOMENTUM_SGD
    assert found.plan == same.plan
    assert "optimizer" not in found.problem.assumed


def test_bounds_count_what_simulations_count() -> None:
    whole = {"pp": 1, "dp": 4, "sharding": "zero-1"}
    found, more = (planned(optimizer, **whole, **SMALL) for optimizer in ({"name": "sgd"}, {}))
    assert found.ranking is not None
    layout = found.ranking.fitting[0].layout
    bounds, higher = (Bounds(replace(one.problem, memory_risk=0.5)) for one in (found, more))
    less = higher.resident_bytes(layout) - bounds.resident_bytes(layout)
    parameters = sum(found.problem.job.graph.amounts("parameters", layout.shape(found.problem.job.sequence)))
    assert less == pytest.approx(4 * parameters / 4 * (1 + ALLOCATOR_SLACK), rel=1e-6)
    sizes = zip(higher.layer_bytes(layout).states, bounds.layer_bytes(layout).states, strict=True)
    assert sum(two - one for two, one in sizes) == pytest.approx(less, rel=1e-6)
    assert found.prediction is not None
    assert more.prediction is not None
    assert found.prediction.step_s < more.prediction.step_s


def test_what_is_not_known_to_be_elementwise_is_not_shared_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned({"name": "own_optimizers:Silent"}, **SMALL)
    assert found.ranking is not None
    for candidate in found.ranking.fitting:
        assert (candidate.layout.sharding, candidate.layout.tp) == ("zero-0", 1)
    for pin in ({"sharding": "zero-1"}, {"tp": 2}):
        with pytest.raises(InputError, match="not known to step every element by itself"):
            planned({"name": "own_optimizers:Silent"}, **SMALL, **pin)


def test_what_is_assumed_of_silence_is_said_with_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(run_with({"name": "own_optimizers:Silent"}, planner="homogeneous", **SMALL).to_toml())
    assert weft(["plan", str(file)]) == 0
    assert "optimizer: AdamW's two states per parameter" in " ".join(capsys.readouterr().out.split())
    told = run_with({"name": "own_optimizers:Silent", "state_bytes": 4}, **SMALL)
    assert "optimizer" not in problem_of_run(told).assumed


def test_a_plan_that_counts_less_than_the_run_keeps_is_told() -> None:
    plan = planned({"name": "sgd"}, **SMALL).plan
    assert uncounted({"name": "sgd"}, plan) == []
    assert uncounted({"name": "sgd", "momentum": 0.0}, plan) == []
    (violation,) = uncounted({}, plan)
    assert str(violation) == (
        "plan: optimizer: counts 4 bytes of states per parameter; adamw keeps 8; plan the run again"
    )


def test_norms_of_whole_tensors_are_shared_out_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    planned({"name": "lamb"}, **SMALL, sharding="zero-1")
    nvlamb = planned({"name": "nvlamb"}, **SMALL)
    assert nvlamb.plan.method(GRADIENT_NORM) is not None
    (violation,) = uncounted({"name": "lamb"}, planned({}, **SMALL).plan)
    assert str(violation) == (
        "plan: optimizer: counts other sums over whole tensors than lamb takes; plan the run again"
    )


def test_whole_matrices_are_shared_out_and_told() -> None:
    planned({"name": "muon"}, **SMALL, sharding="zero-1")
    (violation,) = uncounted({"name": "muon"}, planned({}, **SMALL).plan)
    assert str(violation) == (
        "plan: optimizer: counts other orthogonalisations of matrices than muon makes; plan the run again"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tp": 2}, "tensor ranks step a share of every matrix"),
        ({"on": "2xa100-80gb + 2xt4", "sharding": "zero-0", "dp": 4}, "replicas would drift apart"),
    ],
)
def test_what_muon_cannot_do_is_refused_in_one_line(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        planned({"name": "muon"}, **{**SMALL, **changes})


def test_muon_refuses_models_without_blocks() -> None:
    asked = {
        "model": {"preset": "resnet-50"},
        "task": {"kind": "image-classification"},
        "optimizer": {"name": "muon"},
        "cluster": {"use": "2xt4"},
    }
    with pytest.raises(InputError, match="muon orthogonalises matrices of blocks, and the model has none"):
        plan_run(parse_run(asked))


def test_a_search_for_another_optimizer_is_another_job() -> None:
    problem = problem_of_run(run_with({}, **SMALL))
    job = replace(problem.job, optimizer=MOMENTUM_SGD)
    assert problem_of_run(run_with({"name": "sgd"}, **SMALL)).job == job
