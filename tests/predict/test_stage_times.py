from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from weft.errors import InputError
from weft.predict.abstract import PassTimes, read_stage_times


def test_stages_are_read_in_order_and_exactly(tmp_path: Path) -> None:
    path = tmp_path / "stages.csv"
    path.write_text("Forward, backward\n0.1,0.2\n1/3, 2\n")
    assert read_stage_times(path) == (
        PassTimes(Fraction(1, 10), Fraction(1, 5)),
        PassTimes(Fraction(1, 3), Fraction(2)),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["line 1", "forward,backward"]),
        ("1,2\n", ["line 1", "1,2"]),
        ("forward,backward\n", ["no stage"]),
        (
            "forward,backward\n1,2,3\nx,-1\n\n1,0\n",
            ["line 2", "3 values", "line 3, forward", "line 3, backward", "line 4", "line 5, backward"],
        ),
    ],
)
def test_a_broken_file_is_refused_line_by_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "stages.csv"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_stage_times(path)
    assert all(word in str(refused.value) for word in words)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.csv"):
        read_stage_times(tmp_path / "none.csv")
