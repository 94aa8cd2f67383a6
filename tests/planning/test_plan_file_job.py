"""Plan files carry their model and cluster: they work anywhere, and move to others when told."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import weft
from weft.describe.plan_file import PlanFile
from weft.errors import InputError
from weft.planning.plan_file_job import plan_file_job
from weft.training.session import job_in

# One runner searches for all of them.
pytestmark = pytest.mark.xdist_group("plan files")

OTHER = """
[model]
preset = "gpt-1m"
[train]
global_batch = 8
[cluster]
use = "2xt4"
"""
CLUSTER = """
[[node]]
name = "mine"
count = 2
device = "t4"
devices = 2
[[link]]
between = ["mine", "mine"]
bandwidth = "3 Gbit/s"
latency = "40 us"
"""
CONFIG = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 32,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 32,
}


@cache
def planned(on: str = "4xa100-80gb") -> weft.Planned:
    return weft.plan(model="gpt-1m", on=on, global_batch=16)


def saved(folder: Path) -> Path:
    return planned().save(folder / "plan.json")


def test_a_saved_plan_is_simulated_as_it_was_planned(tmp_path: Path) -> None:
    found = planned()
    path = found.save(tmp_path / "plan.json")
    assert weft.simulate(path).end_ns.tolist() == weft.simulate(found).end_ns.tolist()


def test_a_run_file_is_planned_and_simulated(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text(OTHER)
    assert weft.simulate(path).end_ns.tolist() == weft.plan(path).simulate().end_ns.tolist()


def test_a_plan_for_a_folder_and_a_cluster_file_needs_neither_of_them(tmp_path: Path) -> None:
    made, elsewhere = tmp_path / "made", tmp_path / "elsewhere"
    made.mkdir()
    elsewhere.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "cluster.toml").write_text(CLUSTER)
    found = weft.plan(model=str(made), on=str(made / "cluster.toml"), global_batch=16)
    path = found.save(elsewhere / "plan.json")
    for name in ("config.json", "cluster.toml"):
        (made / name).unlink()
    job = plan_file_job(path)
    assert job.file == found.job.file
    assert job.predicted.prediction == found.job.predicted.prediction


def test_a_run_file_beside_a_plan_is_not_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (tmp_path / "run.toml").write_text("no run file at all")
    assert plan_file_job(path).file == planned().job.file


def test_a_plan_keeps_what_its_run_file_says(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(OTHER.replace("global_batch = 8", "global_batch = 8\nsteps = 7"))
    path = weft.plan(tmp_path / "run.toml").save(tmp_path / "plan.json")
    (tmp_path / "run.toml").unlink()
    assert plan_file_job(path).run.train.steps == 7


def test_a_plan_moves_to_another_cluster_with_its_decisions(tmp_path: Path) -> None:
    path, there = saved(tmp_path), planned("4xh100-80gb").job
    job = job_in(path, on="4xh100-80gb")
    assert job.plan.stages == planned().plan.stages
    assert job.plan.cluster_fingerprint == there.plan.cluster_fingerprint
    # The prediction is not the one that the file holds for the first cluster.
    assert job.prediction.step_s < planned().prediction.step_s


def test_a_plan_moves_to_another_model_of_as_many_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "n_positions": 256}))
    job = job_in(saved(tmp_path), model=str(tmp_path))
    assert job.plan.model == tmp_path.name
    assert job.plan.stages == planned().plan.stages
    assert job.problem.model.hidden == 32


def test_a_moved_plan_keeps_its_batch_its_sequence_and_its_precision(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "n_positions": 1024}))
    path = weft.plan(model="gpt-1m", on="4xa100-80gb").save(tmp_path / "plan.json")
    job = job_in(path, model=str(tmp_path), on="8xh100-80gb")
    posed, plan = job.problem.job, job.plan
    assert (posed.global_batch, posed.sequence, posed.precision) == (32, 256, "bf16")
    assert (plan.global_batch, plan.sequence, plan.precision) == (32, 256, "bf16")
    assert job.problem.model.sequence == 256
    # The run file says it, too, so that the run directory poses the same job.
    assert (job.run.train.global_batch, job.run.task.sequence) == (32, 256)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"on": "2xa100-80gb"}, "has ranks 0 to 1"),
        ({"on": "nothing"}, "'nothing' is not this-machine"),
        ({"model": "llama-7b"}, "no stage has layers"),
    ],
)
def test_a_plan_that_does_not_work_there_is_refused(
    tmp_path: Path, changes: dict[str, str], line: str
) -> None:
    with pytest.raises(InputError, match=line):
        job_in(saved(tmp_path), **changes)


def test_a_plan_without_its_subject_is_for_what_its_names_mean(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PlanFile(planned().plan).to_json())
    assert plan_file_job(path).plan == planned().plan
    path.write_text(path.read_text().replace("4xa100-80gb", "a cluster of nobody"))
    with pytest.raises(InputError, match="has no key 'subject'"):
        plan_file_job(path)


def test_a_plan_of_another_machine_is_not_trained(tmp_path: Path) -> None:
    job = weft.plan(model="gpt-1m", on="this-machine").job
    assert job.elsewhere == []
    moved = job_in(saved(tmp_path))
    assert moved.elsewhere == []
    other = moved.run.model_copy(update={"cluster": type(moved.run.cluster)()})
    [line] = type(moved)(run=other, problem=moved.problem, plan=moved.plan).elsewhere
    assert "4 a100-80gb" in str(line)
