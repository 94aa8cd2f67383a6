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


def install_small(packages: Path, source: str) -> None:
    (packages / "weft_example").mkdir()
    (packages / "weft_example" / "small.py").write_text(source)
    (named,) = re.findall(r"```toml\n(\[project.entry-points.*?)```", PAGE, re.DOTALL)
    register(packages, "weft-example", tomllib.loads(named)["project"]["entry-points"])


def test_the_planner_of_a_package_is_found_by_its_name(packages: Path) -> None:
    _, source = BLOCKS
    install_small(packages, source)
    job = {"model": "gpt-1m", "on": "4xa100-80gb", "global_batch": 8}
    assert weft.plan(**job, planner="small").plan.micro_batch_size == 1
    with pytest.raises(InputError, match=r"^planner: 'smal' is not one of .*\(nearest valid: small\)$"):
        weft.plan(**job, planner="smal")


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("def space(", "def spaces(", "planner: 'small' is no planner: it has no space"),
        ('name = "small"', 'name = "amp"', "planner: two planners are called 'amp'"),
        (
            "return replace(found, candidates=tuple(small))",
            "return small",
            "planner small: search returns list, no",
        ),
    ],
)
def test_what_is_no_planner_is_refused_in_one_line(
    packages: Path, right: str, wrong: str, problem: str
) -> None:
    _, source = BLOCKS
    assert right in source
    install_small(packages, source.replace(right, wrong))
    with pytest.raises(InputError, match=f"^{problem}"):
        weft.plan(model="gpt-1m", on="4xa100-80gb", global_batch=8, planner="small")


def test_the_example_replays_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    source, _ = BLOCKS
    exec(compile(source, "planners.md", "exec"), {})
    assert capsys.readouterr().out.startswith("Degrees(tensor_parallel=")


def test_every_planner_has_its_row() -> None:
    assert set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)) == set(PLANNERS)
