"""What the contributing guide shows works as it says, out of an installed package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from installing import ROOT, printed
from pool import WorkerPool
from pooled_runs import trained
from safetensors.torch import load_file

from weft.describe.run_file import load_run
from weft.planning.problem import problem_of_run
from weft.predict.abstract import simulate_schedule
from weft.program.verify import verify

SCHEDULE = "last-in-first-out"
ROWS = ROOT / "tests" / "methods" / "rows" / "gradient_norm.py"
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


def test_the_rows_of_the_guide_are_those_of_the_suite() -> None:
    [block] = printed("py")
    lines, last = textwrap.dedent(block).rstrip().rsplit("\n", 1)
    assert last.strip() == "..."
    assert lines in ROWS.read_text(encoding="utf-8")


@pytest.mark.parametrize(("devices", "micro_batches"), [(1, 1), (2, 1), (3, 5), (4, 8)])
@pytest.mark.usefixtures("weft_example")
def test_the_schedule_of_the_guide_is_valid_and_as_fast_as_gpipe(devices: int, micro_batches: int) -> None:
    figures = simulate_schedule(SCHEDULE, devices=devices, micro_batches=micro_batches)
    assert verify(figures.program) == []
    assert figures.makespan == Fraction(3 * (micro_batches + devices - 1))
    assert figures.peak_in_flight == (micro_batches,) * devices


def asked_of(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which finds packages by itself."""
    code = "import sys; from weft.cli.main import run; sys.exit(run(sys.argv[1:]))"
    environment = os.environ | {"WEFT_HOME": str(folder / "home")}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def weft(folder: Path, *arguments: str) -> Any:
    """What a command answers."""
    asked = asked_of(folder, *arguments, "--json")
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


@pytest.mark.examples
@pytest.mark.usefixtures("weft_example", "warm_starts")
def test_the_schedule_of_the_guide_is_planned_and_simulated(tmp_path: Path) -> None:
    job = ("gpt-1m", "--on", "4xa100-80gb", "--global-batch", "8", "--pp", "4", "--top", "1000")
    found = weft(tmp_path, "plan", *job)["candidates"]
    assert {"1f1b", SCHEDULE} < {one["schedule"] for one in found}
    (best, *_) = weft(tmp_path, "plan", *job, "--schedule", SCHEDULE, "--out", "plan.json")["candidates"]
    assert (best["schedule"], best["verdict"]) == (SCHEDULE, "fits")
    assert weft(tmp_path, "simulate", "plan.json")["plan_id"] == best["plan_id"]


def write_run(folder: Path, name: str, *, tables: str = "", **changed: Any) -> Path:
    """The path of a small run's file."""
    words = {"contract": "exact", "pp": 2, "dp": 1, "schedule": "1f1b", "sync": "dense", **changed}
    (folder / "text.txt").write_text("The sheep of the hills are counted twice. " * 200)
    path = folder / f"{name}.toml"
    path.write_text(RUN.format(**words) + tables)
    return path


def losses(directory: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.examples
@pytest.mark.usefixtures("own_home")
def test_the_schedule_of_the_guide_is_trained(
    tmp_path: Path, weft_example: Path, worker_pool: WorkerPool
) -> None:
    plain, newest_first = (
        trained(
            worker_pool,
            write_run(tmp_path, name, schedule=name),
            directory=tmp_path / name,
            packages=weft_example,
        )
        for name in ("gpipe", SCHEDULE)
    )
    assert losses(newest_first) == pytest.approx(losses(plain), rel=1e-9)


@pytest.mark.examples
@pytest.mark.processes
@pytest.mark.usefixtures("weft_example", "warm_starts")
def test_replicas_of_a_whole_run_agree_as_a_package_says(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, "run", pp=1, dp=2, contract="empirical", sync="rounded")
    weft(tmp_path, "train", run_file.name, "--directory", "rounded")
    first, *_, last = losses(tmp_path / "rounded")
    assert last < first
    assert json.loads((tmp_path / "rounded" / "plan.json").read_text())["sync"]["name"] == "rounded"


def test_files_that_the_guide_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:src|tests|docs)/[\w/.-]+)`", text)) | set(
        re.findall(r"\]\((docs/[\w/.-]+)\)", text)
    )
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def tensors(directory: Path) -> dict[str, Any]:
    """Those of the newest checkpoint by name."""
    newest = max((directory / "checkpoints").iterdir())
    return {name: value for file in newest.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.examples
@pytest.mark.usefixtures("own_home")
def test_the_method_of_the_guide_is_trained_kept_and_drawn(
    tmp_path: Path, weft_example: Path, worker_pool: WorkerPool
) -> None:
    def train(run_file: Path, **options: Any) -> Path:
        return trained(worker_pool, run_file, packages=weft_example, **options)

    averaged = write_run(tmp_path, "averaged", tables="[gradient-average]\ndecay = 0.5\n")
    plain = train(write_run(tmp_path, "run"), directory=tmp_path / "plain", steps=4)
    whole = train(averaged, directory=tmp_path / "whole", steps=4)
    parts = train(averaged, directory=tmp_path / "parts", steps=2)
    train(averaged, resume=parts, steps=4)
    weights, kept, again = (tensors(one) for one in (plain, whole, parts))
    averages = {name for name in kept if name.startswith("method/gradient-average/")}
    assert averages == kept.keys() - weights.keys()
    # It changes nothing of the training, and a resumed run keeps the same.
    assert all(torch.equal(kept[name], value) for name, value in weights.items())
    assert all(torch.equal(again[name], value) for name, value in kept.items())
    assert any(kept[name].abs().max() > 0 for name in averages)
    plan = json.loads((whole / "plan.json").read_text())
    assert plan["methods"] == [{"name": "gradient-average", "options": {"decay": 0.5}}]
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(row["gradient_average_norm"] > 0 for row in metrics)
    page = (whole / "report.html").read_text()
    assert '<section id="gradient-average"' in page
    assert {kind["kind"] for kind in weft(tmp_path, "compare", "whole")["kinds"]} >= {"average", "step"}


@pytest.mark.examples
@pytest.mark.usefixtures("weft_example")
def test_the_method_of_the_guide_is_planned_and_priced(tmp_path: Path) -> None:
    job = "[model]\npreset = 'gpt-1m'\n[train]\nglobal_batch = 8\n[cluster]\nuse = '4xa100-80gb'\n"
    pinned = "[plan]\npp = 2\ndp = 2\nsharding = 'zero-0'\nschedule = '1f1b'\nmicro_batch_size = 1\n"
    (tmp_path / "same.toml").write_text(job + pinned)
    (tmp_path / "averaged.toml").write_text(job + pinned + "[gradient-average]\n")
    averaged, same = (weft(tmp_path, "simulate", f"{name}.toml") for name in ("averaged", "same"))
    assert averaged["step_s"] > same["step_s"]
    assert averaged["breakdown"]["average"] > 0
    run = load_run(tmp_path / "same.toml")
    parameters = problem_of_run(run).job.graph.parameters()
    more = [one - other for one, other in zip(averaged["peak_bytes"], same["peak_bytes"], strict=True)]
    # bf16 accumulates gradients in fp32; both replicas keep all of them, and the allocator its slack.
    assert sum(more) == pytest.approx(2 * 4 * parameters * 1.03, rel=0.02)


@pytest.mark.examples
@pytest.mark.usefixtures("weft_example")
def test_what_the_method_of_the_guide_does_not_go_with_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[model]\npreset = 'gpt-1m'\n[train]\nglobal_batch = 8\n[cluster]\nuse = '2xa100-80gb'\n"
        "[plan]\ndp = 2\npp = 1\nsharding = 'zero-1'\n[gradient-average]\ndecay = 0.5\n"
    )
    refused = asked_of(tmp_path, "plan", "run.toml")
    assert refused.returncode == 2
    assert "gradient-average: zero-1 leaves no replica the whole gradient" in refused.stderr
    (tmp_path / "run.toml").write_text("[model]\npreset = 'gpt-1m'\n[gradient-average]\ndekay = 0.5\n")
    refused = asked_of(tmp_path, "check", "run.toml")
    assert refused.returncode == 2
    assert "gradient-average: dekay: unknown key; allowed are decay (nearest valid: decay)" in refused.stdout
