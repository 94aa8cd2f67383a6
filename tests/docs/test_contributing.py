"""What the contributing guide shows works as it says, out of an installed package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from installing import ROOT

from weft.predict.abstract import simulate_schedule
from weft.program.verify import verify

SCHEDULE = "last-in-first-out"
RUN = """
[model]
preset = "gpt-1m"
[task]
data = "text.txt"
sequence = 32
[train]
global_batch = 4
steps = 3
precision = "fp64"
[goal]
contract = "{contract}"
[plan]
pp = {pp}
dp = {dp}
micro_batch_size = 1
schedule = "{schedule}"
[sync]
method = "{sync}"
"""


@pytest.mark.parametrize(("devices", "micro_batches"), [(1, 1), (2, 1), (3, 5), (4, 8)])
@pytest.mark.usefixtures("weft_example")
def test_the_schedule_of_the_guide_is_valid_and_as_fast_as_gpipe(devices: int, micro_batches: int) -> None:
    figures = simulate_schedule(SCHEDULE, devices=devices, micro_batches=micro_batches)
    assert verify(figures.program) == []
    assert figures.makespan == Fraction(3 * (micro_batches + devices - 1))
    assert figures.peak_in_flight == (micro_batches,) * devices


def weft(folder: Path, *arguments: str) -> Any:
    """What the command answers in a process of its own, which finds packages by itself."""
    code = "import sys; from weft.cli.main import run; sys.exit(run(sys.argv[1:]))"
    environment = os.environ | {"WEFT_HOME": str(folder / "home")}
    command = [sys.executable, "-c", code, *arguments, "--json"]
    asked = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


@pytest.mark.usefixtures("weft_example")
def test_the_schedule_of_the_guide_is_planned_and_simulated(tmp_path: Path) -> None:
    job = ("gpt-1m", "--on", "4xa100-80gb", "--global-batch", "8", "--pp", "4", "--top", "1000")
    found = weft(tmp_path, "plan", *job)["candidates"]
    assert {"1f1b", SCHEDULE} < {one["schedule"] for one in found}
    (best, *_) = weft(tmp_path, "plan", *job, "--schedule", SCHEDULE, "--out", "plan.json")["candidates"]
    assert (best["schedule"], best["verdict"]) == (SCHEDULE, "fits")
    assert weft(tmp_path, "simulate", "plan.json")["plan_id"] == best["plan_id"]


def losses(folder: Path, name: str, **changed: Any) -> list[float]:
    words = {"contract": "exact", "pp": 2, "dp": 1, "schedule": "gpipe", "sync": "dense", **changed}
    (folder / "text.txt").write_text("The sheep of the hills are counted twice. " * 200)
    (folder / f"{name}.toml").write_text(RUN.format(**words))
    weft(folder, "train", f"{name}.toml", "--directory", name)
    return [json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.processes
@pytest.mark.usefixtures("weft_example")
def test_the_schedule_of_the_guide_is_trained(tmp_path: Path) -> None:
    plain = losses(tmp_path, "plain")
    assert losses(tmp_path, "newest-first", schedule=SCHEDULE) == pytest.approx(plain, rel=1e-9)


@pytest.mark.processes
@pytest.mark.usefixtures("weft_example")
def test_replicas_agree_as_a_package_says(tmp_path: Path) -> None:
    first, *_, last = losses(
        tmp_path, "rounded", pp=1, dp=2, schedule="1f1b", contract="empirical", sync="rounded"
    )
    assert last < first
    assert json.loads((tmp_path / "rounded" / "plan.json").read_text())["sync"]["name"] == "rounded"


def test_files_that_the_guide_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:src|tests|docs)/[\w/.-]+)`", text)) | set(
        re.findall(r"\]\((docs/[\w/.-]+)\)", text)
    )
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
