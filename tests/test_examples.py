"""Every file under examples/ is legal, and what can be run here does what it says."""

from __future__ import annotations

import csv
import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import weft
from weft.cli.main import run
from weft.describe.cluster_file import load_cluster
from weft.describe.run_file import load_run
from weft.lab.scheme import scheme_of
from weft.methods.cser.options import ABSENCES, RETURNED
from weft.planning.lost_replicas import DIED
from weft.training.directory.run_directory import RunDirectory

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(path for path in EXAMPLES.rglob("*.toml") if "runs" not in path.parts)
CLUSTER_FILES = [path for path in FILES if "[[node]]" in path.read_text()]
RUN_FILES = [path for path in FILES if path not in CLUSTER_FILES]


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.parent.name)
def test_run_files_are_legal(path):
    assert load_run(path).model


@pytest.mark.parametrize("path", CLUSTER_FILES, ids=lambda path: path.stem)
def test_a_lab_can_be_made_of_every_cluster(path):
    assert scheme_of(load_cluster(path), range(2), 1).ranks


@pytest.mark.examples
@pytest.mark.processes
def test_others_go_on_without_a_killed_rank_and_a_new_one_takes_its_place(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    words = ["train", str(EXAMPLES / "lost-rank" / "run.toml"), "--directory", str(directory.path)]
    with subprocess.Popen([sys.executable, "-m", "weft", *words, "--steps", "1000"]) as launcher:
        while len(directory.metrics()) < 10:
            assert launcher.poll() is None
            time.sleep(0.01)
        workers = {one.name(): one for one in psutil.Process(launcher.pid).children(recursive=True)}
        workers["weft-rank-2"].kill()
        while not any(event["event"] == ABSENCES for event in directory.events()):
            assert launcher.poll() is None
            time.sleep(0.1)
        assert all(workers[f"weft-rank-{rank}"].is_running() for rank in (0, 1))
        # It saves the last step.
        launcher.terminate()
    told = directory.events()
    [died] = [event for event in told if event["event"] == DIED]
    assert died["replicas"] == [2]
    assert died["step"] % 4 == 0
    [back] = [one for event in told if event["event"] == ABSENCES for one in event[RETURNED]]
    assert back["first"] == died["step"] // 4
    assert told[-1]["event"] == "stopped"
    losses = [row["loss"] for row in directory.metrics()]
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.examples
@pytest.mark.processes
def test_a_loop_of_ones_own_learns(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    plan = tmp_path / "plan.json"
    words = "plan gpt-1m --on this-machine --global-batch 16 --sequence 128 --pp 2 --dp 1 --out"
    assert run([*words.split(), str(plan)]) == 0
    script = str(EXAMPLES / "own-loop" / "own_loop.py")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = subprocess.run(
        [sys.executable, *launcher, script, str(plan)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", finished.stdout)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.examples
@pytest.mark.processes
def test_a_folder_of_transformers_is_fine_tuned_and_loaded_again(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    text = tmp_path / "text.txt"
    text.write_text("a shuttle carries the weft through the warp\n" * 200)
    out = tmp_path / "out"
    script = str(EXAMPLES / "fine-tune" / "fine_tune.py")
    words = ["--data", str(text), "--steps", "12", "--sequence", "32", "--out", str(out)]
    finished = subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "exported: GPT2LMHeadModel with " in finished.stdout
    result = json.loads((out / "run" / "summary.json").read_text())
    assert result["final_loss"] < result["first_loss"]


@pytest.mark.examples
@pytest.mark.processes
def test_digits_are_learned(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    finished = weft.train(EXAMPLES / "images" / "digits.toml", steps=60, directory=tmp_path / "run")
    assert finished.summary["final_loss"] < finished.summary["first_loss"] - 0.1
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 60


@pytest.mark.examples
def test_clipped_micro_batches_come_closer_where_labels_are_wrong(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "clipping"))
    regression = importlib.import_module("regression")
    regression.require_as_weft()
    rates = {2: 0.1, 64: 0.0125}
    found = {
        size: regression.errors(regression.LABELS, size, rate, [500], 2)[0] for size, rate in rates.items()
    }
    assert found[2] < 0.5 * found[64]


@pytest.mark.examples
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_scopes_of_a_balance_are_compared(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    script = str(EXAMPLES / "experts" / "scopes.py")
    words = ["--quick", "--steps", "6", "--folder", str(tmp_path / "experts")]
    finished = subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, timeout=560, check=False
    )
    assert finished.returncode == 0, finished.stderr
    head, *rows, last = finished.stdout.splitlines()
    assert head.split()[:5] == ["balance", "weight", "data", "loss", "python"]
    assert [row.split()[0] for row in rows] == ["micro-batch", "global-batch", "none"]
    for row in rows:
        figures = [float(one) for one in row.replace("%", "").split()[3:]]
        assert len(figures) == 11
        # Bytes at random are a perplexity of 256, and a text's own shares of bytes much less.
        assert all(2.0 < one < 256.0 for one in figures[1:5])
        assert 0.0 < figures[5] < 0.5
    assert re.search(r"weight 0\.02, 1 seeds: mean [+-]0\.\d+", last)
