"""Runs of real processes of which one hangs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from waiting_runs import process, variables, wait_for, write_run_file

from weft.training.directory.run_directory import RunDirectory

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_starts")]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Of a run that waits in its tenth step until the file `go-on` is there."""
    for name, value in variables(tmp_path, wait_in_step=9).items():
        monkeypatch.setenv(name, value)
    return RunDirectory(tmp_path / "run")


@contextmanager
def training(directory: RunDirectory, hang: str) -> Iterator[subprocess.Popen[str]]:
    tables = f"[checkpoint]\nevery = 1000\n[report]\nhang = '{hang}'\nhang_after_s = 4\n"
    run_file = write_run_file(directory.path.parent, steps=200, tables=tables)
    with process("-m", "weft", "train", run_file, "--directory", directory.path) as launcher:
        yield launcher


def worker(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    processes = psutil.Process(launcher.pid).children(recursive=True)
    (found,) = (one for one in processes if one.name() == f"weft-rank-{rank}")
    return found


def hangs(directory: RunDirectory) -> list[tuple[list[int], str]]:
    events = directory.events()
    return [(event["ranks"], event["problem"]) for event in events if event["event"] == "hang"]


def test_a_stopped_worker_is_told_and_the_run_goes_on_with_it(directory: RunDirectory) -> None:
    with training(directory, "warn") as launcher:
        # The data of rank 0 do not come, while both ranks get to run.
        wait_for(lambda: [0] in [ranks for ranks, _ in hangs(directory)], launcher)
        _, problem = hangs(directory)[-1]
        assert ": rank 1 waits for rank 0, which has not ended forward of stage 0, micro-batch " in problem
        assert "no sign of life" not in problem
        stopped = worker(launcher, 1)
        stopped.suspend()
        (directory.path.parent / "go-on").touch()
        wait_for(lambda: [1] in [ranks for ranks, _ in hangs(directory)], launcher)
        assert " and gives no sign of life" in hangs(directory)[-1][1]
        stopped.resume()
        _, errors = launcher.communicate(timeout=120)
        assert launcher.returncode == 0, errors
    told = [event["event"] for event in directory.events()]
    assert told.count("hang over") == told.count("hang")
    for _, problem in hangs(directory):
        assert errors.count(f"warning: {problem}\n") == 1


def test_a_stopped_worker_ends_the_run_where_the_run_file_says_so(directory: RunDirectory) -> None:
    (directory.path.parent / "go-on").touch()
    with training(directory, "stop") as launcher:
        wait_for(lambda: bool(directory.metrics()), launcher)
        family = psutil.Process(launcher.pid).children(recursive=True)
        worker(launcher, 1).suspend()
        _, errors = launcher.communicate(timeout=120)
        assert launcher.returncode == 1, errors
    hint, line = errors.splitlines()[-2:]
    assert hint == f"no checkpoint yet; start again with: weft train {directory.path}"
    assert line.startswith("weft: ")
    assert "rank 1" in line
    assert "no sign of life" in line
    assert line.endswith(f"(log: {directory.path / 'logs' / 'rank-1.log'})")
    assert directory.events()[-1]["event"] == "hang"
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
