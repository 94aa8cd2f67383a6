"""Files of a run directory that are not what a run writes: one line, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import InputError, RunError
from weft.training.directory.run_directory import RunDirectory


@pytest.mark.parametrize(
    ("text", "line"), [('{\n "steps": 4', "not a JSON file: "), ("[4]", "not the table that a run writes")]
)
def test_a_broken_summary_is_refused_in_one_line(tmp_path: Path, text: str, line: str) -> None:
    directory = RunDirectory(tmp_path)
    with pytest.raises(RunError, match=r"the run has not finished$"):
        directory.summary()
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(InputError) as refused:
        directory.summary()
    [violation] = refused.value.violations
    assert str(violation).startswith(f"{tmp_path / 'summary.json'}: {line}")
