"""`weft plan`: reasons, smallest changes and forecasts, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli.main import run

QUESTION = ("plan", "gpt-1m", "--precision", "fp16", "--global-batch", "16")
TIGHT = ("plan", "llama-7b", "--on", "8xa100-80gb", "--global-batch", "32", "--planner", "uniform")


pytestmark = pytest.mark.usefixtures("own_home")


def test_forecasts_stand_below_the_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("--what-if", "-1 node a100-80gb", "--what-if", "+1 node t4")
    assert run([*QUESTION, "--on", "16xa100-80gb", "--planner", "uniform", *changes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 80
    (heading,) = [index for index, line in enumerate(lines) if line.startswith("cluster ")]
    assert [line.split("  ")[0] for line in lines[heading + 1 : heading + 5]] == [
        "as it is",
        "-1 node a100-80gb",
        "+1 node t4",
        "all together",
    ]
    assert "cost/M tokens" not in lines[heading]
    assert "cannot run" in lines[heading + 2]


def test_prices_of_a_cluster_file_become_costs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[node]]\nname = "fast"\ncount = 2\ndevice = "a100-80gb"\ndevices = 2\n'
        "[device.a100-80gb]\nprice_per_hour = 2.0\n"
    )
    assert run([*QUESTION, "--on", str(path), "--planner", "uniform", "--what-if", "-1 node fast"]) == 0
    shown = capsys.readouterr().out
    assert "cost/M tokens" in shown
    assert (
        run([*QUESTION, "--on", str(path), "--planner", "uniform", "--what-if", "-1 node fast", "--json"])
        == 0
    )
    before, after = json.loads(capsys.readouterr().out)["what_if"]
    assert before["change"] == ""
    assert (before["devices"], after["devices"]) == (4, 2)
    tokens = before["tokens_per_s"] * before["step_s"]
    assert before["cost_per_million_tokens"] == pytest.approx(8.0 * before["step_s"] / 3600 / tokens * 1e6)
    assert after["against"] == pytest.approx(after["step_s"] / before["step_s"])
    assert after["unchanged"]["verdict"] == "refused"
    assert after["best"]["verdict"] == "fits"


def test_rejected_rows_say_what_makes_them_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TIGHT, "--top", "60"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "; fits with " in words
    assert run([*TIGHT, "--top", "60", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rejected = [row for row in answer["candidates"] if row["verdict"] == "too big"]
    assert rejected
    changes = [row["smallest_change"] for row in rejected if row["smallest_change"] is not None]
    assert changes
    assert all(change["verdict"] == "fits" and change["step_s"] > 0 for change in changes)
    assert all(row["smallest_change"] is None for row in answer["candidates"] if row["verdict"] == "fits")


def test_every_row_behind_the_best_says_how_surely(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TIGHT, "--top", "60", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["candidates"]
    best, *behind = [row for row in rows if row["verdict"] == "fits"]
    assert best["probability_faster"] is None
    assert behind
    chances = [row["probability_faster"] for row in behind]
    assert all(0.0 < chance <= 1.0 for chance in chances)
    assert all(row["standing"] for row in behind)
    assert any(row["standing"].startswith("slower") for row in behind)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--what-if", "iner 25 Gbit/s"],
            "weft: --what-if: 'iner 25 Gbit/s' is no change that is known, such as 'inter 25 Gbit/s', "
            "'intra 100 GB/s', 'memory 40 GB', 'device h100-80gb', '+1 node a100-80gb' "
            "(nearest valid: inter 25 Gbit/s)",
        ),
        (
            ["--what-if", "memory 40 GB", "--compare", "amp"],
            "weft: --what-if: not with --compare, which names several planners",
        ),
        (
            ["--what-if", "memory 40 GB", "--curve"],
            "weft: --what-if: not with --curve, which searches every batch",
        ),
    ],
)
def test_a_mistake_is_a_clear_line(
    capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    assert run([*QUESTION, "--on", "8xa100-80gb", *options]) == 2
    assert expected in capsys.readouterr().err.splitlines()
