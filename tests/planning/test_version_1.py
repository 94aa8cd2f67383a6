"""Plan files that version 1 wrote are the plans that planning gives today.

The files under `version_1/` were written by weft before plans had a second version.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.describe.plan import Plan
from weft.describe.plan_file import PlanFile, check_plan, load_plan_file
from weft.describe.plan_subject import subject_of
from weft.describe.plan_versions import former_ids
from weft.describe.prediction import Prediction
from weft.describe.run_file import parse_run
from weft.moves.layout import build_plan, flops_per_layer
from weft.moves.layout_of_plan import layout_of
from weft.planning.planned import plan_run, planned_for
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import problem_of_run

FILES = Path(__file__).parent / "version_1"
PIPELINES: dict[str, Any] = {"pp": 2, "dp": 2, "schedule": "1f1b"}
# The model, the cluster, keys of [plan], and of other tables.
RUNS: dict[str, tuple[str, str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "zero-3-in-islands": (
        "gpt-1m",
        "8xa100-80gb",
        {"pp": 2, "dp": 4, "loops": 2, "schedule": "breadth-first", "sharding": "zero-3", "island": 2},
        {},
    ),
    "context-ranks": (
        "llama-1m",
        "8xa100-80gb",
        {"pp": 1, "dp": 2, "cp": 2, "tp": 2, "schedule": "breadth-first", "sharding": "zero-1"},
        {"optimizer": {"clip_norm": 1.0}},
    ),
    "clipped": ("gpt-1m", "4xa100-80gb", PIPELINES, {"optimizer": {"clip_norm": 0.5}}),
    "recompute-per-stage": (
        "gpt-1m",
        "4xa100-80gb",
        {**PIPELINES, "recompute": ["full", "selective"]},
        {},
    ),
    "bf16": (
        "gpt-1m",
        "2xa100-80gb",
        {"pp": 1, "dp": 2, "loops": 4, "schedule": "breadth-first"},
        {"train": {"precision": "bf16"}},
    ),
    "bf16-sgd": (
        "gpt-1m",
        "2xa100-80gb",
        {"pp": 1, "dp": 2, "loops": 4, "schedule": "breadth-first"},
        {"train": {"precision": "bf16"}, "optimizer": {"name": "sgd"}},
    ),
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))


def planned(name: str) -> PlannedJob:
    model, on, keys, others = RUNS[name]
    record: dict[str, dict[str, Any]] = {
        "model": {"preset": model},
        "task": {"kind": "causal-lm", "data": "python-stdlib", "sequence": 128},
        "train": {"global_batch": 16, "precision": "fp32"},
        "cluster": {"use": on},
        "plan": {"micro_batch_size": 2, "sharding": "zero-1", **keys},
    }
    for table, more in others.items():
        record[table] = {**record.get(table, {}), **more}
    return plan_run(parse_run(record))


def written(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((FILES / f"{name}.json").read_text())
    return record


def with_figures_of(other: Prediction, prediction: Prediction) -> Prediction:
    named = "peak_bytes", "peak_high_bytes", "communicator_bytes"
    timed = "step_s", "step_low_s", "step_high_s", "first_step_s"
    figures = {name: getattr(other, name) for name in (*named, *timed)}
    return prediction.model_copy(update=figures)


@pytest.mark.parametrize("name", RUNS)
def test_a_file_of_version_1_is_the_plan_of_today(name: str) -> None:
    job, found = planned(name), load_plan_file(FILES / f"{name}.json")
    assert written(name)["version"] == 1
    assert found.plan == job.plan
    assert found.prediction is not None
    # Version 1 counted no temporary activations and no communicators, and had other constants of time.
    prediction = with_figures_of(job.prediction, found.prediction)
    assert (found.plan, prediction, found.subject) == (*job.file[:2], None)
    assert found.plan.plan_id == job.plan.plan_id != written(name)["plan_id"]
    assert former_ids(job.plan) == {written(name)["plan_id"]}
    given = planned_for(subject_of(job.run), found.plan, prediction)
    assert (given.plan, given.prediction) == (job.plan, job.prediction)


def test_communication_that_blocks_and_another_stack_are_read() -> None:
    run = planned("clipped").run
    run = run.model_copy(update={"optimizer": type(run.optimizer)()})
    problem, found = problem_of_run(run), load_plan_file(FILES / "blocking.json")
    assert (found.plan.blocking, found.plan.stack) == (("messages", "reductions"), "megatron-lm")
    assert check_plan(found.plan, problem.job.graph, problem.job.cluster) == []
    layout = replace(layout_of(found.plan), layers_per_stage=None)
    today = build_plan(problem.job, layout, [1.0] * len(flops_per_layer(problem.job)))
    assert found == PlanFile(today.model_copy(update={"stack": "megatron-lm"}))
    assert former_ids(found.plan) == {written("blocking")["plan_id"]}


@pytest.mark.parametrize("path", sorted(FILES.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_written_again_is_of_version_2_and_the_same(path: Path, tmp_path: Path) -> None:
    found = load_plan_file(path)
    again = tmp_path / "plan.json"
    again.write_text(found.to_json())
    record = json.loads(again.read_text())
    assert record["version"] == 2
    assert record.keys() <= {*Plan.model_fields, "plan_id", "prediction"}
    assert load_plan_file(again) == found
