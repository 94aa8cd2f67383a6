"""The Python interface: what is no path, no word or no place is refused as the command line refuses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import weft
from weft.api import Planned
from weft.errors import InputError


@pytest.fixture(scope="module")
def planned() -> Planned:
    return weft.plan(model="gpt-1m", on="2xt4", global_batch=8)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda one: weft.simulate(one.plan), "source: .*: must be a path, or the result of weft.plan"),
        (lambda one: weft.simulate(None), "source: None: must be a path"),
        (lambda one: weft.plan(3), "source: 3: must be a path"),
        (lambda one: weft.plan(model=3), "model: 3: must be a name or a path .*mymodule:build"),
        (lambda one: weft.plan(model="gpt-1m", on=["a"]), r"on: \['a'\]: must be a name or a path"),
        (lambda one: weft.plan("run.toml", pp=2), "run.toml: no such file"),
        (lambda one: weft.plan("gpt-1m", model="gpt2"), "model: gpt2; the source is a model, too"),
        (lambda one: weft.plan(model="gpt2", global_batch=10**8), "global_batch: 100000000"),
        (lambda one: weft.simulate("plan.json", on=3), "on: 3: must be a name or a path"),
        (lambda one: weft.simulate(one, on="8xt4"), "on: a planned job has its own; plan again"),
        (lambda one: one.save(3), "path: 3: must be a path$"),
        (lambda one: one.save("."), "is a folder; name a file"),
        (lambda one: one.save("nowhere/plan.json"), "nowhere does not exist"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    planned: Planned, call: Callable[[Planned], object], line: str
) -> None:
    with pytest.raises(InputError, match=line) as refused:
        call(planned)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda one: weft.train(3), "source: 3: must be a path"),
        (lambda one: weft.train(one, model="gpt-1m"), "model: a planned job has its own; plan again"),
        (lambda one: weft.train(one, directory=3), "directory: 3: must be a path$"),
        (lambda one: weft.train(one, resume="nowhere"), "nowhere: not a run directory"),
        (lambda one: weft.train(one, on_poll=3), "on_poll: 3: must be a function"),
        (lambda one: weft.train(one, resume=3), "resume: 3: must be a path$"),
        (lambda one: weft.evaluate(3), "directory: 3: must be a path$"),
    ],
)
def test_wrong_arguments_start_no_worker(
    planned: Planned,
    call: Callable[[Planned], object],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=line):
        call(planned)
    assert not [*tmp_path.iterdir()]


def test_a_run_directory_is_named_with_its_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    with pytest.raises(
        InputError, match=r"a run directory; its run file is planned \(nearest valid: .*run.toml"
    ):
        weft.plan(tmp_path)


def test_a_saved_plan_is_simulated_like_the_planned_job(planned: Planned, tmp_path: Path) -> None:
    path = planned.save(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"is a plan; weft\.simulate and weft\.train take it"):
        weft.plan(path)
    assert repr(weft.simulate(path)) == repr(planned.simulate())


def test_arguments_replace_keys_of_a_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "gpt-10m"\n[train]\nglobal_batch = 8\n[cluster]\nuse = "4xt4"\n')
    plan = weft.plan(path, model="gpt-1m", on="2xt4", global_batch=4, pp=2).plan
    assert (plan.model, plan.cluster, plan.global_batch, len(plan.stages)) == ("gpt-1m", "2xt4", 4, 2)


def test_models_and_clusters_may_be_paths_and_a_model_may_come_first(tmp_path: Path) -> None:
    model, cluster = tmp_path / "config.json", tmp_path / "cluster.toml"
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 257, "n_positions": 16}
    model.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    cluster.write_text('[[node]]\nname = "own"\ndevice = "t4"\ncount = 1\ndevices = 2\n')
    asked = {"on": cluster, "global_batch": 8, "sequence": 16}
    assert weft.plan(model=model, **asked).plan == weft.plan(model, **asked).plan


def test_a_step_of_years_is_refused() -> None:
    with pytest.raises(InputError, match="no layout fits"):
        weft.plan(model="gpt2", on="8xa100-80gb", global_batch=32, sequence=10**9)
