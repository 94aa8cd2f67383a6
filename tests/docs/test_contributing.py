"""What the contributing guide shows works as it says."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from weft.predict.abstract import simulate_schedule
from weft.program import schedules
from weft.program.schedules.base import Schedule
from weft.program.verify import verify

ROOT = Path(__file__).parents[2]


@pytest.fixture
def schedule() -> Schedule:
    """The schedule whose complete file the guide prints."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, "CONTRIBUTING.md", "exec"), names)
    instance: Schedule = names["LastInFirstOut"]()
    return instance


@pytest.mark.parametrize(("devices", "micro_batches"), [(1, 1), (2, 1), (3, 5), (4, 8)])
def test_the_schedule_of_the_guide_is_valid_and_as_fast_as_gpipe(
    schedule: Schedule, devices: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = MappingProxyType({**schedules.SCHEDULES, schedule.name: schedule})
    monkeypatch.setattr(schedules, "SCHEDULES", known)
    figures = simulate_schedule(schedule.name, devices=devices, micro_batches=micro_batches)
    assert verify(figures.program) == []
    assert figures.makespan == Fraction(3 * (micro_batches + devices - 1))
    assert figures.peak_in_flight == (micro_batches,) * devices


def test_files_that_the_guide_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:src|tests|docs)/[\w/.-]+)`", text)) | set(
        re.findall(r"\]\((docs/[\w/.-]+)\)", text)
    )
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
