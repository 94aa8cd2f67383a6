"""`weft plan --compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli.main import run
from weft.describe.plan_file import load_plan_file
from weft.planning.planners import PLANNERS

QUESTION = ("plan", "gpt-1m", "--on", "4xa100-80gb+4xt4", "--precision", "fp16", "--global-batch", "16")


pytestmark = pytest.mark.usefixtures("own_home")


def test_each_planner_has_a_row_and_its_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert run([*QUESTION, "--compare", "amp, megatron,metis-form,amp,exhaustive", "--out", str(path)]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(len(line) for line in lines if "wrote" not in line) <= 80
    (heading,) = [index for index, line in enumerate(lines) if line.startswith("planner")]
    rows = [line.split() for line in lines[heading + 1 : heading + 5]]
    assert {row[0] for row in rows} == {"amp", "megatron", "metis-form", "exhaustive"}
    assert rows[0][3] == "best"
    assert rows[-1][0] == "exhaustive"
    assert "exhaustive simulates 2000 layouts at most" in " ".join(shown.split())
    assert shown.rstrip().endswith(f"wrote {path}")
    assert load_plan_file(path).prediction is not None


def test_json_gives_the_figures_of_every_planner(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*QUESTION, "--compare", "uniform,amp", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["assumed"]) == {"network_between_nodes", "links_inside_nodes", "sequence"}
    assert {one["planner"] for one in answer["answers"]} == {"uniform", "amp"}
    for one in answer["answers"]:
        assert one["fits"]
        assert one["best"]["step_s"] > 0
        assert (one["best"]["estimate_s"] is None) == (one["planner"] == "uniform")
    assert answer["answers"][0]["behind"] == 0


def test_a_ranking_shows_what_the_planner_itself_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*QUESTION, "--planner", "amp", "--top", "3"]) == 0
    assert "; estimated" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--compare", "amp", "--planner", "amp"],
            "weft: --planner: not with --compare, which names several planners",
        ),
        (["--compare", "amp", "--curve"], "weft: --compare: not with --curve, which searches every batch"),
        (["--compare", ""], "weft: --compare: names no planner (nearest valid: homogeneous,amp)"),
        (
            ["--compare", "amp,megatro"],
            f"weft: planner: 'megatro' is not one of {', '.join(sorted(PLANNERS))} (nearest valid: megatron)",
        ),
        (
            ["--compare", "amp,uniform", "--schedule", "zb-h1"],
            "weft: amp: no layout fits: plan.schedule: amp plans 1f1b and gpipe, not 'zb-h1' "
            "(nearest valid: 1f1b)",
        ),
    ],
)
def test_a_mistake_is_a_clear_line(
    capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    assert run([*QUESTION, *options]) == 2
    assert expected in capsys.readouterr().err.splitlines()
