"""What training would refuse, `weft check` lists with the same lines, and no folder is left."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from pooled_runs import prepared

from weft.cli.main import run
from weft.describe.run_file import load_run
from weft.errors import InputError
from weft.planning.planned_job import PlannedJob
from weft.training.checkpoint.manifest import generation_path, manifest
from weft.training.checkpoint.training_state import TrainingState
from weft.training.session import reopen

TABLES = {
    "model": {"preset": "gpt-1m"},
    "task": {"sequence": 32},
    "train": {"global_batch": 4, "steps": 2},
    "cluster": {"use": "1xa100-80gb"},
}
VOCABULARY = {
    "version": "1.0",
    "model": {
        "type": "WordLevel",
        "vocab": {**{f"w{index}": index for index in range(300)}, "<|endoftext|>": 300},
        "unk_token": "w0",
    },
}


pytestmark = pytest.mark.usefixtures("own_home")


def run_file(folder: Path, changes: dict[str, dict[str, str]] | None = None) -> Path:
    path = folder / "run.toml"
    names = dict.fromkeys((*TABLES, "report", "checkpoint", *(changes or {})))
    tables = {name: {**TABLES.get(name, {}), **(changes or {}).get(name, {})} for name in names}
    lines = [
        f"[{name}]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items() if value is not None)
        for name, table in tables.items()
    ]
    path.write_text("\n".join(lines))
    return path


def lines_of(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    """Return the refusal's lines, as check or another command prints them."""
    assert run([str(word) for word in words]) == 2
    said = capsys.readouterr()
    lines = (said.out or said.err).splitlines()
    return [line.removeprefix("weft: ").strip() for line in lines]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"task": {"data": "nowhere/texts"}}, ["task.data: 'nowhere/texts' does not exist"]),
        ({"task": {"tokenizer": "nowhere.json"}}, ["task.tokenizer: 'nowhere.json' does not exist"]),
        ({"task": {"tokenizer": "{folder}/tokenizer.json"}}, ["model.vocabulary: 256 is too small"]),
        ({"task": {"data": "{folder}/empty"}}, ["holds no text"]),
        ({"task": {"kind": "waiting_task:Absent"}}, ["task.kind: 'waiting_task:Absent' cannot be imported"]),
        (
            {"task": {"kind": "__main__:Own"}},
            ["task.kind: '__main__:Own': ranks are other processes; put it into a file", "imported"],
        ),
        ({"task": {"kind": "pathlib:Path"}}, ["'pathlib:Path' is no task: it has no batch and no loss"]),
        (
            {"model": {"preset": None, "build": "own_models:images"}, "task": {"sequence": None}},
            ["task.kind: 'causal-lm' gives tokens, and own_models:images reads images"],
        ),
        ({"report": {"log": ["wandb:no_such_package.log"]}}, ["report.log"]),
        (
            {
                "task": {"data": "nowhere/texts", "tokenizer": "nowhere.json"},
                "report": {"log": ["wandb:no_such_package.log"]},
            },
            ["report.log", "task.tokenizer", "task.data"],
        ),
        (
            {"checkpoint": {"directory": "{folder}/tokenizer.json/kept"}},
            ["checkpoint.directory: {folder}/tokenizer.json: is not a folder"],
        ),
        ({"checkpoint": {"directory": "{folder}/new/kept"}}, []),
        ({"train": {"global_batch": 3, "precision": "fp16"}}, []),
    ],
)
def test_check_and_train_refuse_a_run_file_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, found: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "tokenizer.json").write_text(json.dumps(VOCABULARY))
    filled = json.loads(json.dumps(changes).replace("{folder}", str(tmp_path)))
    path = run_file(tmp_path, filled)
    if not found:
        assert run(["check", str(path)]) == 0
        assert not (tmp_path / "new").exists()
        return
    checked = lines_of(capsys, "check", path)
    assert len(checked) == len(found)
    for line, part in zip(checked, found, strict=True):
        assert part.replace("{folder}", str(tmp_path)) in line
    assert lines_of(capsys, "train", path, "--directory", tmp_path / "run") == checked
    assert not (tmp_path / "run").exists()


def test_check_and_plan_tell_a_warm_up_that_the_run_does_not_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path, {"train": {"steps": 3}, "optimizer": {"warm_up_steps": 4}})
    for command in ("check", "plan"):
        assert run([command, str(path)]) == 0
        warning = capsys.readouterr().err
        assert "warning: optimizer.warm_up_steps is 4, and the run has 3 steps: the learning rate" in warning


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_for_checkpoints_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (kept := tmp_path / "kept").mkdir(mode=0o500)
    path = run_file(tmp_path, {"checkpoint": {"directory": str(kept / "runs")}})
    assert lines_of(capsys, "check", path) == [f"checkpoint.directory: {kept}: cannot be written"]


def test_a_plan_file_is_checked_like_its_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plan = run_file(tmp_path, {"task": {"data": "nowhere/texts"}}), tmp_path / "plan.json"
    assert run(["plan", str(path), "--out", str(plan)]) == 0
    capsys.readouterr()
    [line] = lines_of(capsys, "check", plan)
    assert "task.data" in line
    assert lines_of(capsys, "train", plan, "--directory", tmp_path / "run") == [line]
    assert not (tmp_path / "run").exists()


def test_a_plan_is_checked_on_another_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert run(["plan", "gpt-1m", "--on", "4xa100-80gb", "--out", str(plan)]) == 0
    assert run(["check", str(plan), "--on", "4xh100-80gb"]) == 0
    capsys.readouterr()
    assert any("has ranks 0 to 1" in line for line in lines_of(capsys, "check", plan, "--on", "2xh100-80gb"))


def test_a_plan_is_trained_on_another_cluster(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert run(["plan", str(run_file(tmp_path)), "--out", str(plan)]) == 0
    planned, directory = prepared(plan, on="1xh100-80gb", directory=tmp_path / "run")
    assert planned.plan.cluster == "1xh100-80gb"
    assert load_run(directory.path / "run.toml").cluster.use == "1xh100-80gb"
    assert reopen(directory.path).file == planned.file
    with pytest.raises(InputError, match="--on goes with a run file or a plan file"):
        prepared(directory.path, on="1xt4")


def test_a_run_file_is_checked_for_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_file(tmp_path)
    assert run(["check", str(path), "--model", "gpt-10m"]) == 0
    capsys.readouterr()
    [line] = lines_of(capsys, "check", path, "--model", "gpt-10n")
    assert "gpt-10m" in line


def checkpoint(planned: PlannedJob, directory: Path, step: int, *, seed: int = 0) -> Path:
    folder = generation_path(directory / "checkpoints", step)
    folder.mkdir(parents=True)
    state = TrainingState(
        step=step,
        samples=0,
        plan_id="",
        seed=seed,
        model=planned.plan.model_fingerprint,
        precision=planned.plan.precision,
        data="",
        first_loss=0.0,
    )
    contents = {"state.json": state.record(), "state.bin": bytes(range(step))}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    digests = {name: (len(one), hashlib.sha256(one).hexdigest()) for name, one in contents.items()}
    (folder / "manifest.json").write_bytes(manifest(digests))
    return folder


def test_damaged_checkpoints_of_a_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned, directory = prepared(run_file(tmp_path), directory=tmp_path / "run")
    whole, flipped, torn = (checkpoint(planned, directory.path, step) for step in (4, 8, 12))
    assert run(["check", str(directory.path)]) == 0
    capsys.readouterr()
    (flipped / "state.bin").write_bytes(bytes(8))
    (torn / "manifest.json").unlink()
    lines = lines_of(capsys, "check", directory.path)
    assert [part for part in (torn, flipped, whole) if any(str(part) in line for line in lines)] == [
        torn,
        flipped,
    ]


def test_checkpoints_of_another_job_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned, directory = prepared(run_file(tmp_path), directory=tmp_path / "run")
    checkpoint(planned, directory.path, 4)
    other = checkpoint(planned, directory.path, 8, seed=7)
    [line] = lines_of(capsys, "check", directory.path)
    assert line.startswith(f"{other}: saved with seed 7, this run has 0")


@pytest.mark.processes
@pytest.mark.usefixtures("warm_starts")
def test_what_only_workers_can_refuse_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("six tokens")
    path = run_file(tmp_path, {"task": {"data": str(tmp_path / "texts")}})
    assert run(["train", str(path)]) == 2
    assert "need 33 tokens each" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
