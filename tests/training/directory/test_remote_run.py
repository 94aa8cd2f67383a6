"""A run behind a URL: it outlives its directory, and goes on as if nothing had happened."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pool import WorkerPool
from pooled_runs import trained
from safetensors.torch import load_file

from weft.cli.main import run
from weft.training.directory.run_directory import RunDirectory
from weft.training.session import source_at

STEPS = 6
RUN = """
[model]
preset = "gpt-1m"
[task]
sequence = 32
[train]
steps = 6
global_batch = 8
precision = "fp32"
[plan]
dp = 2
[checkpoint]
every = 2
directory = "{url}"
"""


@pytest.fixture(autouse=True)
def _own_folder(own_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(url=(tmp_path / "store").as_uri()))
    return path


def url_of(tmp_path: Path) -> str:
    [folder] = (tmp_path / "store").iterdir()
    return folder.as_uri()


def losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in RunDirectory(run_dir).metrics()}


def tensors(run_dir: Path) -> dict[str, bytes]:
    files = sorted((run_dir / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors"))
    assert files
    return {name: value.numpy().tobytes() for file in files for name, value in load_file(file).items()}


@pytest.mark.processes
def test_a_run_outlives_its_directory(worker_pool: WorkerPool, tmp_path: Path) -> None:
    path = run_file(tmp_path)
    whole = trained(worker_pool, path, directory=tmp_path / "whole")
    shutil.rmtree(tmp_path / "store")
    lost = trained(worker_pool, path, directory=tmp_path / "runs" / "one", steps=4)
    shutil.rmtree(lost)
    # The worker processes may be in another folder.
    back = trained(worker_pool, source_at(url_of(tmp_path)).resolve(), steps=STEPS)
    assert back == lost
    assert losses(back) == losses(whole)
    resumed = [event for event in RunDirectory(back).events() if event["event"] == "resumed"]
    assert [event["step"] for event in resumed] == [4]
    assert tensors(back) == tensors(whole)


@pytest.mark.processes
def test_the_same_run_prepared_on_another_node_goes_on_with_its_history(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    path, name = run_file(tmp_path), "1f3a90c2" * 4

    def directory() -> Path:
        run_dir = tmp_path / "runs" / "one"
        run_dir.mkdir(parents=True)
        (run_dir / "run-id").write_text(name)
        return run_dir

    first = trained(worker_pool, path, directory=directory(), steps=4)
    before = losses(first)
    shutil.rmtree(first)
    again = trained(worker_pool, path, directory=directory())
    assert url_of(tmp_path).endswith("/one-1f3a90c2")
    found = losses(again)
    assert sorted(found) == list(range(STEPS))
    assert {step: found[step] for step in before} == before


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert run(list(words)) == 2
    told = capsys.readouterr()
    return (told.out or told.err).splitlines()


def test_a_url_without_a_run_and_a_directory_of_another_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = (tmp_path / "store").as_uri()
    [line] = lines(capsys, "train", f"{url}/one-12345678")
    assert line.startswith(f"weft: {url}/one-12345678: no run: it has no run-id")
    there = tmp_path / "store" / "one-12345678"
    there.mkdir(parents=True)
    (there / "run-id").write_text("12345678\n")
    for other in (None, "87654321"):
        (tmp_path / "runs" / "one").mkdir(parents=True, exist_ok=True)
        if other is not None:
            (tmp_path / "runs" / "one" / "run-id").write_text(other)
        [line] = lines(capsys, "train", f"{url}/one-12345678")
        assert line.startswith("weft: runs/one: holds another run than the storage")


def test_check_refuses_storage_without_its_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(url="gluster://volume/runs"))
    [line] = lines(capsys, "check", str(path))
    assert line == "checkpoint.directory: gluster://volume/runs: Protocol not known: gluster"
