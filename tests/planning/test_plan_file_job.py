"""Plan files find their model and cluster, whatever lies beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft
from weft.errors import InputError
from weft.training.session import plan_file_job

OTHER = """
[model]
preset = "gpt-1m"
[train]
global_batch = 8
[cluster]
use = "2xt4"
"""


def saved(folder: Path) -> Path:
    return weft.plan(model="gpt-1m", on="4xa100-80gb", global_batch=16).save(folder / "plan.json")


def test_a_saved_plan_is_simulated_as_it_was_planned(tmp_path: Path) -> None:
    planned = weft.plan(model="gpt-1m", on="4xa100-80gb", global_batch=16)
    path = planned.save(tmp_path / "plan.json")
    assert weft.simulate(path).end_ns.tolist() == weft.simulate(planned).end_ns.tolist()


def test_a_run_file_is_planned_and_simulated(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text(OTHER)
    assert weft.simulate(path).end_ns.tolist() == weft.plan(path).simulate().end_ns.tolist()


def test_a_run_file_for_another_cluster_beside_a_plan_is_passed_over(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (tmp_path / "run.toml").write_text(OTHER)
    assert plan_file_job(path).plan.cluster == "4xa100-80gb"


def test_a_run_file_beside_a_plan_says_what_the_plan_does_not(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(OTHER.replace("global_batch = 8", "global_batch = 8\nsteps = 7"))
    path = weft.plan(tmp_path / "run.toml").save(tmp_path / "plan.json")
    assert plan_file_job(path).run.train.steps == 7


def test_a_plan_that_nothing_fits_is_refused_for_the_run_file_beside_it(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_text(path.read_text().replace("4xa100-80gb", "a cluster of nobody"))
    (tmp_path / "run.toml").write_text(OTHER)
    with pytest.raises(InputError, match="cluster_fingerprint"):
        plan_file_job(path)
