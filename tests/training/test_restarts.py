"""Runs that start again after a failure, as often as their run file says."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from waiting_runs import process, variables, wait_for, write_run_file

from weft.training.directory.run_directory import RunDirectory

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_starts")]

OFTEN = "[checkpoint]\nevery = 2\n[run]\nmax_restarts = {restarts}\n"
TOLD = ("started", "resumed", "restarted", "finished")


def told(run_dir: Path) -> list[str]:
    return [one["event"] for one in RunDirectory(run_dir).events() if one["event"] in TOLD]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_run_goes_on_from_its_checkpoint_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    for name, value in variables(tmp_path, wait_in_step=5).items():
        monkeypatch.setenv(name, value)
    path = write_run_file(tmp_path, steps=8, tables=OFTEN.format(restarts=restarts))
    run_dir = tmp_path / "run"
    with process("-m", "weft", "train", path, "--directory", run_dir) as launcher:
        saved = run_dir / "checkpoints" / "step-00000004" / "manifest.json"
        wait_for(lambda: saved.exists() and (tmp_path / "pid-1").exists(), launcher)
        (tmp_path / "go-on").touch()
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        _, errors = launcher.communicate(timeout=120)
    if not restarts:
        assert launcher.returncode == 1
        assert told(run_dir) == ["started"]
        return
    assert launcher.returncode == 0, errors
    assert told(run_dir) == ["started", "restarted", "resumed", "finished"]
    (warning,) = [line for line in errors.splitlines() if "starts again" in line]
    assert warning.startswith("warning: rank 1 ")
    assert warning.endswith("; the run starts again, and may do so 0 more times")
    rows = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, rows)][-4:] == [4, 5, 6, 7]
    assert len(RunDirectory(run_dir).metrics()) == 8


def test_a_run_that_fails_again_and_again_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(tmp_path, wait_in_step=100).items():
        monkeypatch.setenv(name, value)
    tables = OFTEN.format(restarts=2) + "[optimizer]\nname = 'sgd'\nlearning_rate = 1e30\n"
    path, run_dir = write_run_file(tmp_path, steps=8, tables=tables), tmp_path / "run"
    with process("-m", "weft", "train", path, "--directory", run_dir) as launcher:
        _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert told(run_dir).count("restarted") == 2
    assert "the loss is" in errors.splitlines()[-2] + errors.splitlines()[-1]
