"""Whole runs from the command line: who can reach them, how they stop, and what a full disk leaves."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from growing_runs import growing
from listeners import is_loopback, listeners
from small_disk import fill, small_disk

from weft.cli.runs import Progress
from weft.training.checkpoint.manifest import newest_complete
from weft.training.directory.run_directory import RunDirectory

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_starts")]

RUN = """
[model]
preset = "gpt-1m"
[task]
data = "{data}"
sequence = 32
[train]
global_batch = 4
steps = 100000
[cluster]
use = "this-machine"
[plan]
pp = 2
dp = 1
schedule = "1f1b"
micro_batch_size = 1
[checkpoint]
every = {every}
"""
LIMIT_S = 120.0


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `weft train` of a run that goes on for hours, and kills it in the end."""
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Of 9 sheep, 3 are black. " * 2000)
    started: list[subprocess.Popen[str]] = []

    def begin(directory: Path, every: int = 100000) -> subprocess.Popen[str]:
        (tmp_path / "run.toml").write_text(RUN.format(data=tmp_path / "texts", every=every))
        words = [sys.executable, "-m", "weft", "train", str(tmp_path / "run.toml"), "--directory"]
        started.append(
            subprocess.Popen(
                [*words, str(directory)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for(run: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def events(directory: Path, name: str) -> list[dict]:
    return [event for event in RunDirectory(directory).events() if event["event"] == name]


@pytest.mark.cold
def test_a_run_that_trains_listens_on_loopback_only_and_sigterm_ends_it_with_the_way_to_go_on(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    directory = tmp_path / "run"
    run = start(directory)
    wait_for(run, lambda: RunDirectory(directory).metrics())
    found = listeners(psutil.Process(run.pid))
    assert found
    assert [address for _, address in found if not is_loopback(address)] == []

    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 143
    assert said.splitlines()[-1] == f"resume with: weft train {directory}"
    (stopped,) = events(directory, "stopped")
    path, skipped = newest_complete(directory / "checkpoints")
    assert (path, skipped) == (directory / "checkpoints" / f"step-{stopped['step']:08d}", [])


def test_a_stopped_worker_does_not_hold_up_sigterm_for_long(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    directory = tmp_path / "run"
    run = start(directory, every=10)
    wait_for(run, lambda: events(directory, "checkpoint"))
    workers = [
        process
        for process in psutil.Process(run.pid).children(recursive=True)
        if process.name().startswith("weft-rank-")
    ]
    workers[1].suspend()
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 143
    note, hint = said.splitlines()[-2:]
    assert note == "weft: ranks 0, 1 did not end after SIGTERM and had to be killed"
    assert hint == f"resume with: weft train {directory}"
    assert not [process for process in workers if process.is_running()]
    assert newest_complete(directory / "checkpoints")[0] is not None


def test_a_full_disk_is_told_and_the_checkpoint_before_stays_whole(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    directory = disk / "run"
    with small_disk(disk, 1 << 28):
        run = start(directory, every=10)
        wait_for(run, lambda: events(directory, "checkpoint"))
        fill(disk / "filler")
        _, said = run.communicate(timeout=LIMIT_S)
        found = newest_complete(directory / "checkpoints")
        run.kill()
    assert run.returncode == 1
    hint, line = said.splitlines()[-2:]
    assert hint == f"resume with: weft train {directory}"
    # A rank, and whichever file is written first.
    told = re.fullmatch(r"weft: (.*)No space left on device \(log: (.*)\)", line)
    assert told is not None, line
    assert re.search(r"\brank [01]: ", told[1])
    assert f"{directory}/" in told[1]
    assert re.fullmatch(rf"{directory}/logs/rank-[01]\.log", told[2])
    path, skipped = found
    assert path is not None
    assert path.name.startswith("step-")
    assert skipped == []


def test_a_stop_says_how_to_go_on_as_far_as_that_is_true(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hint(failed: bool, *told: str) -> str:
        progress = Progress(quiet=True, unit="tokens")
        progress.update(RunDirectory(grown.path))
        for event in told:
            grown.tell(event, step=0, time_s=time.time())
        progress.resume_hint(failed=failed)
        return capsys.readouterr().err

    with growing(tmp_path, "run") as (grown,):
        again = f"no checkpoint yet; start again with: weft train {grown.path}\n"
        resume = f"resume with: weft train {grown.path}\n"
        assert hint(True) == hint(False) == again
        (grown.path / "checkpoints" / "step-00000001").mkdir(parents=True)
        # It may be damaged: this start neither resumed from it nor wrote it.
        assert hint(True) == ""
        assert hint(False) == resume
        assert hint(True, "resumed") == hint(True, "checkpoint") == resume
