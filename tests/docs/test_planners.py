"""What the page on planners shows works as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.planning.planners import PLANNERS

PAGE = (Path(__file__).parents[2] / "docs" / "planners.md").read_text(encoding="utf-8")


def test_the_example_replays_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(source, "planners.md", "exec"), {})
    assert capsys.readouterr().out.startswith("Degrees(tensor_parallel=")


def test_every_planner_has_its_row() -> None:
    assert set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)) == set(PLANNERS)
