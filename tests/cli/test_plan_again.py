"""`weft plan --from`: the table, the record, the written plan in training, and what makes no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import WorkerPool
from pooled_runs import trained

from weft.cli.main import run
from weft.describe.plan_file import load_plan_file

pytestmark = pytest.mark.usefixtures("own_home")

CLUSTER = """
name = "small"
[[node]]
name = "all"
device = "cpu"
devices = 3
bandwidth = "1 GB/s"
latency = "50 us"
speeds = [1.0, 0.7, 0.5]
[device.cpu]
flops = { fp32 = "2 GFLOP/s" }
memory = "2 GB"
memory_bandwidth = "10 GB/s"
launch = "5 us"
synchronous = true
"""
RUN = """
[model]
preset = "candle-uno-tiny"
[train]
global_batch = 64
steps = 8
[cluster]
use = "{folder}/cluster.toml"
[plan]
planner = "baechi"
dp = 1
"""


@pytest.fixture
def old(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A plan file of a model placed on three unlike devices."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path))
    path = tmp_path / "old.json"
    assert run(["plan", str(tmp_path / "run.toml"), "--out", str(path)]) == 0
    capsys.readouterr()
    return path


def test_the_table_begins_with_the_plan_that_moves_the_fewest_bytes(
    old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = ["plan", "--from", str(old), "--without", "device 2"]
    assert run(question) == 0
    shown = capsys.readouterr().out
    assert run([*question, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    lines = shown.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "now on   small without device 2" in lines
    (heading,) = [index for index, line in enumerate(lines) if "break-even" in line and "moved" in line]
    assert lines[heading].split() == ["step", "moved", "in", "break-even", "plan"]
    first, *others = record["plans"]
    assert first["break_even_step"] is None
    assert all(one["break_even_step"] >= 0 for one in others)
    assert first["moved_bytes"] == min(one["moved_bytes"] for one in record["plans"])
    assert first["moved_bytes"] == sum(first["received_bytes"]) == first["lost_bytes"] > 0
    assert record["former_ranks"] == [0, 1]
    assert "come from the newest checkpoint, at 1.00 GB/s" in " ".join(shown.split())
    assert record["assumed_states"] in " ".join(shown.split())


@pytest.mark.processes
def test_a_run_goes_on_under_the_written_plan_as_if_nothing_had_happened(
    old: Path, tmp_path: Path, worker_pool: WorkerPool
) -> None:
    through, broken, following = tmp_path / "through", tmp_path / "broken", tmp_path / "next.json"
    trained(worker_pool, old, directory=through, steps=8)
    trained(worker_pool, old, directory=broken, steps=4)
    question = ["plan", "--from", str(broken / "plan.json"), "--without", "device 2"]
    assert run([*question, "--out", str(following)]) == 0
    assert load_plan_file(old).plan.ranks == 3
    assert load_plan_file(following).plan.ranks == 2
    trained(worker_pool, following, resume=broken, steps=8)
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (through, broken)
    ]
    assert len(losses[0]) == 8
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run.toml"], "SOURCE: not with --from, which plans the job of that file again"),
        (["--on", "4xt4"], "again; another job or cluster: weft plan RUN.toml --on CLUSTER"),
        (["--compare", "amp"], "--compare: not with --from"),
        (["--curve"], "--curve: not with --from"),
        (["--pp", "2"], "--pp: not with --from"),
        (["--planner", "amp"], "--planner: not with --from"),
        (["--all"], "--all: not with --from"),
        (["--without", "device 3"], "'device 3': small has devices 0 to 2 (nearest valid: device 2)"),
    ],
)
def test_options_that_make_no_sense_are_one_line(
    arguments: list[str], line: str, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--from", str(old), "--without", "device 2", *arguments]) == 2
    answer = capsys.readouterr().err
    assert line in answer
    assert len(answer.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "weft: SOURCE: missing: a RUN.toml, a preset or a folder is planned"),
        (["--from", "old.json"], "weft: --without: missing: --from plans again without something"),
        (["--from", "gone.json", "--without", "t4"], "weft: gone.json: no such file"),
    ],
)
def test_what_is_missing_is_said(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *arguments]) == 2
    assert capsys.readouterr().err.startswith(line)


def test_the_job_of_a_run_is_planned_again_as_that_of_its_plan_file(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text(old.read_text())
    for source in (old, tmp_path / "run"):
        assert run(["plan", "--from", str(source), "--without", "device 1", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
