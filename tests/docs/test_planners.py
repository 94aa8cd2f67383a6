"""What the page on planners shows works as it says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from installing import register

import weft
from weft.errors import InputError
from weft.planning.planners import PLANNERS

PAGE = (Path(__file__).parents[2] / "docs" / "planners.md").read_text(encoding="utf-8")


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_planner_of_a_package_is_found_by_its_name(packages: Path) -> None:
    _, source = BLOCKS
    (packages / "weft_example").mkdir()
    (packages / "weft_example" / "small.py").write_text(source)
    (named,) = re.findall(r"```toml\n(\[project.entry-points.*?)```", PAGE, re.DOTALL)
    register(packages, "weft-example", tomllib.loads(named)["project"]["entry-points"])
    job = {"model": "gpt-1m", "on": "4xa100-80gb", "global_batch": 8}
    assert weft.plan(**job, planner="small").plan.micro_batch_size == 1
    with pytest.raises(InputError, match=r"^planner: 'smal' is not one of .*\(nearest valid: small\)$"):
        weft.plan(**job, planner="smal")


def test_the_example_replays_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = BLOCKS
    exec(compile(source, "planners.md", "exec"), {})
    assert capsys.readouterr().out.startswith("Degrees(tensor_parallel=")


def test_every_planner_has_its_row() -> None:
    assert set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)) == set(PLANNERS)
