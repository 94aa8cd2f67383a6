"""One run per run directory: a second one is refused, and a killed one leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from waiting_runs import process, variables, wait_for, write_run_file

from weft.cli.main import run
from weft.errors import InputError
from weft.training.directory.run_lock import LOCK_FILE, only_run

HOLD = """
import sys, time
from pathlib import Path
from weft.training.directory.run_lock import only_run
with only_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    with process("-c", HOLD, run_dir) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "held\n"
        yield started


def test_the_holder_is_named_and_a_kill_frees_the_lock(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as held:
        with pytest.raises(InputError) as caught, only_run(tmp_path / "run"):
            pass
        (violation,) = caught.value.violations
        name = f"process {held.pid} on {socket.gethostname()}"
        assert str(violation) == (
            f"{tmp_path / 'run'}: is being trained by {name}; wait for its end, or stop it"
        )
        held.send_signal(signal.SIGKILL)
        held.wait()
        assert (tmp_path / "run" / LOCK_FILE).read_text() == name
        with only_run(tmp_path / "run"), holder(tmp_path / "other"):
            assert (tmp_path / "run" / LOCK_FILE).read_text() == (
                f"process {os.getpid()} on {socket.gethostname()}"
            )


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    fork = "import os\n    child = os.fork()\n    if child: print(child, flush=True)\n    time.sleep"
    with process("-c", HOLD.replace("time.sleep", fork), tmp_path) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "held\n"
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        try:
            os.kill(child, 0)
            with only_run(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    with only_run(tmp_path):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path / LOCK_FILE}: the file system does not lock it (No locks")


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that waits in its fourth step until $GO_ON exists."""
    for name, value in variables(tmp_path, wait_in_step=3).items():
        monkeypatch.setenv(name, value)
    # What waits so long would be told as an event.
    tables = "[checkpoint]\nevery = 2\n[report]\nhang_after_s = 3600\n"
    return write_run_file(tmp_path, steps=8, tables=tables)


def files(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of all files but the slots, which live while a rank does."""
    return {
        str(path.relative_to(run_dir)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in run_dir.rglob("*")
        if path.is_file() and "slots" not in path.parts
    }


@pytest.mark.processes
@pytest.mark.usefixtures("warm_starts")
def test_a_second_run_in_a_directory_is_refused_and_touches_nothing(
    run_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_file.parent / "run"
    first_checkpoint = run_dir / "checkpoints" / "step-00000002" / "manifest.json"
    command = ("-m", "weft", "train", run_file, "--directory", run_dir)
    with process(*command) as first:
        metrics = run_dir / "metrics.jsonl"
        wait_for(lambda: first_checkpoint.exists() and metrics.read_text().count("\n") == 2, first)
        before = files(run_dir)
        capfd.readouterr()
        for arguments in (
            ["train", str(run_dir)],
            ["train", str(run_file), "--resume", str(run_dir)],
            ["train", str(run_file), "--resume", str(run_dir), "--prepare-only"],
        ):
            assert run(arguments) == 2
            (line,) = capfd.readouterr().err.splitlines()
            assert line.startswith(f"weft: {run_dir}: is being trained by process {first.pid} on ")
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
        with process(*torchrun, "-m", "weft.training.worker", run_dir) as second:
            _, errors = second.communicate(timeout=90)
        assert f"error: {run_dir}: is being trained by process {first.pid} on " in errors
        assert files(run_dir) == before

        # An evaluation reads only.
        assert run(["eval", str(run_dir)]) == 0
        assert "step 2" in capfd.readouterr().out

        first.send_signal(signal.SIGKILL)
        first.wait()
    (run_file.parent / "go-on").touch()
    assert run(["train", str(run_dir), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["steps"] == 8


@pytest.mark.processes
@pytest.mark.usefixtures("warm_starts")
def test_a_run_of_torchrun_keeps_others_out(run_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = run_file.parent / "run"
    assert run(["train", str(run_file), "--directory", str(run_dir), "--prepare-only"]) == 0
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with process(*torchrun, "-m", "weft.training.worker", run_dir) as first:
        wait_for((run_dir / "metrics.jsonl").exists, first)
        capfd.readouterr()
        assert run(["train", str(run_dir)]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        # Rank 0, a child of torchrun.
        assert psutil.Process(int(line.split("by process ")[1].split()[0])).ppid() == first.pid
