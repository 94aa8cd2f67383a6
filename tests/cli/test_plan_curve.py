"""`weft plan --curve`."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from weft.cli.main import run
from weft.planning.curve import METHODS

pytestmark = pytest.mark.usefixtures("own_home")

QUESTION = ("plan", "gpt-1m", "--on", "4xv100-32gb", "--precision", "fp16")


def test_the_curve_is_printed_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, page = tmp_path / "curve.svg", tmp_path / "curve.html"
    assert run([*QUESTION, "--curve", "--svg", str(picture), "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "assumed critical batch" in shown
    assert "least time" in shown
    assert "\u2026" not in shown
    assert shown.rstrip().endswith(f"wrote {picture}\nwrote {page}")
    ElementTree.parse(picture)
    assert "assumed critical batch" in page.read_text()
    # One best layout for each batch, after the name of its method.
    assert _layouts(shown) == 5
    assert run([*QUESTION, "--curve", "--all"]) == 0
    assert _layouts(capsys.readouterr().out) == 5 * len(METHODS)


def _layouts(shown: str) -> int:
    """Count the rows of the table of layouts: those with samples per device in the first column."""
    table = shown[shown.index("best layout, and why") : shown.index("cost at the cheapest")]
    return sum(bool(line[:7].strip()) for line in table.splitlines()[1:])


def test_json_gives_the_figures_with_the_given_critical_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*QUESTION, "--curve", "--critical-batch", "512", "--tp", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["critical_batch"] == 512
    assert "critical_batch" not in answer["assumed"]
    assert {point["samples_per_device"] for point in answer["points"]} == {0.25, 0.5, 1, 2, 4}
    assert {point.get("tp", 1) for point in answer["points"]} == {1}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--svg", "x.svg"], ["weft: --svg: only with --curve"]),
        (
            ["--curve", "--global-batch", "8", "--out", "plan.json"],
            [
                "weft: --global-batch: not with --curve, which searches every batch",
                "weft: --out: not with --curve, which searches every batch",
            ],
        ),
        (
            ["--curve", "--critical-batch", "0"],
            ["weft: --critical-batch: 0 samples; more than 0 is needed"],
        ),
        (
            ["--curve", "--schedule", "gpipe"],
            ["weft: schedule: 'gpipe' is pinned; the curve compares schedules"],
        ),
    ],
)
def test_a_mistake_is_a_clear_line(
    capsys: pytest.CaptureFixture[str], options: list[str], expected: list[str]
) -> None:
    assert run([*QUESTION, *options]) == 2
    assert capsys.readouterr().err.splitlines() == expected


def test_a_model_that_fits_nowhere_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["plan", "gpt-52b", "--on", "4xv100-32gb", "--precision", "fp16", "--curve"]
    assert run([*question, "--pp", "2", "--dp", "2", "--micro-batch-size", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("weft: no layout fits: ")
