"""What was learned from measured steps, in words and as figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from web.lessons import RATIOS, learned

from weft.cli.corrections import lesson_record, lesson_text

pytestmark = pytest.mark.usefixtures("own_home")


def test_words_say_the_error_what_is_left_of_it_and_where_it_is_kept() -> None:
    lessons = learned()
    sheet, profile = lessons
    first, second, third, last = lesson_text(sheet).splitlines()
    assert first == (
        "small in fp32 on 2x4xcpu, data sheet: error of predictions -50.0% (median of 5 measurements)"
    )
    assert re.fullmatch(
        r"  corrected now: 90 % interval -1\d\.\d% to \+1\d\.\d%; predicted by the others, 5 of 5 inside",
        second,
    )
    assert third.startswith("  times longer: computations cpu 1.")
    assert Path(last.strip()).is_file()
    assert "error of predictions +100.0% (median of 1 measurement)" in lesson_text(profile)


def test_figures_are_those_of_the_words() -> None:
    lessons = learned()
    record = lesson_record(lessons[0])
    assert record["error"] == pytest.approx(-0.5)
    assert record["interval"][0] < 1.0 < record["interval"][1]
    assert [one["measured_step_s"] / one["predicted_step_s"] for one in record["left_out"]] == pytest.approx(
        RATIOS
    )
    assert all(one["low_s"] < one["corrected_step_s"] < one["high_s"] for one in record["left_out"])
