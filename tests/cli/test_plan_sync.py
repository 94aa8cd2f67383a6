"""`[sync] method = "auto"` and `weft plan --compare-sync`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.describe.plan import Choice
from weft.describe.plan_file import load_plan_file
from weft.describe.synchronisation import sync_words

pytestmark = pytest.mark.usefixtures("own_home")

CLUSTER = """
name = "two-nodes"
[[node]]
name = "a"
count = 2
device = "a100-80gb"
devices = 2
[[link]]
between = ["a", "a"]
bandwidth = "1 Gbit/s"
latency = "30 us"
"""
RUN = """
[model]
preset = "gpt-1m"
[task]
sequence = 128
[train]
global_batch = 16
[cluster]
use = "cluster.toml"
[plan]
planner = "uniform"
dp = 4
[goal]
contract = "empirical"
[sync]
method = "auto"
"""


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_the_table_has_a_line_for_each_method_and_fits_80_columns(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert run(["plan", str(run_path), "--compare-sync", "--out", str(path)]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if "wrote" not in line) <= 80
    heads = [line for line in shown.splitlines() if line.startswith("method")]
    assert len(heads) == 3
    for words in ("local-averaging, every 32", "sdp4bit, weights whole", "dense", "of dense's step"):
        assert words in " ".join(shown.split())
    assert load_plan_file(path).plan.sync.name != "dense"


def test_json_gives_the_figures_of_every_method(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(run_path), "--compare-sync", "--json"]) == 0
    methods = json.loads(capsys.readouterr().out)["methods"]
    steps = [one["best"]["step_s"] for one in methods]
    assert steps == sorted(steps)
    dense = next(one for one in methods if one["sync"] == "dense")
    assert dense["sent_between_nodes_bytes"] > methods[0]["sent_between_nodes_bytes"] > 0
    assert {one["steps_apart"] for one in methods if one["sync"] == "local-averaging"} == {4, 8, 16, 32}
    assert {one["contract"] for one in methods} == {"exact", "empirical"}
    assert all(one["codecs_exposed_s"] > 0 for one in methods if one["sync"] == "sdp4bit")
    names = ("codecs_hidden_s", "codecs_exposed_s", "unfused_codecs_hidden_s", "unfused_codecs_exposed_s")
    assert [dense[name] for name in names] == [0, 0, 0, 0]


def test_refused_methods_have_their_reason(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_path.write_text(RUN.replace('"empirical"', '"exact"'))
    assert run(["plan", str(run_path), "--compare-sync"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in ("local-averaging", "sdp4bit"):
        assert f"{name} refused goal.contract 'exact' keeps it out; it is empirical" in shown


def test_auto_tells_its_choice_and_ranks_the_others(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert run(["plan", str(run_path), "--json", "--out", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    best = answer["candidates"][0]
    plan = load_plan_file(path).plan
    assert plan.sync == Choice(name=best["sync"], options=best["sync_options"])
    assert answer["assumed"]["sync"].startswith(f"{sync_words(plan.sync)}, the best of auto")
    assert "sync sdp4bit" in " ".join(one["layout"] for one in answer["candidates"])
    assert best["plan_id"] == plan.plan_id


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--compare-sync", "--compare", "amp"],
            "--compare-sync: not with --compare, which names several planners",
        ),
        (["--compare-sync", "--curve"], "--compare-sync: not with --curve, which searches every batch"),
        (
            ["--compare-sync", "--emit", "megatron"],
            "--emit: not with --compare-sync, which compares methods and chooses none",
        ),
        (
            ["--compare", "amp"],
            "sync.method: 'auto' is for a search of one best plan; say which one (nearest valid: dense)",
        ),
    ],
)
def test_a_mistake_is_a_clear_line(
    run_path: Path, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(run_path), *options]) == 2
    assert f"weft: {expected}" in capsys.readouterr().err.splitlines()
