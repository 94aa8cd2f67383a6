"""What was learned from measured steps, in words, as figures and on a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from predict.cost.machines import CPU, MODEL, cluster
from predict.observed import observed, several
from web.browser import Browser

from weft.cli.main import run
from weft.describe.families import layer_graph
from weft.describe.home import weft_home
from weft.planning.residuals import Lesson, lessons_in
from weft.predict.corrections_file import empty_residuals, save_residuals
from weft.predict.ledger import Entry
from weft.web.calibration import ledger_page, lesson_record, lesson_text, lessons_page

pytestmark = pytest.mark.usefixtures("own_home")

RATIOS = (1.9, 2.0, 2.0, 2.1, 2.2)


@pytest.fixture
def lessons() -> tuple[Lesson, ...]:
    some = [*several(RATIOS, computations=2.0), observed(0.5, source="layer profile", half_width=0.1)]
    residuals = empty_residuals(layer_graph(MODEL), "fp32", cluster(device=CPU))
    save_residuals(residuals.with_more(some), weft_home())
    return lessons_in(weft_home())


def test_words_say_the_error_what_is_left_of_it_and_where_it_is_kept(lessons: tuple[Lesson, ...]) -> None:
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


def test_figures_are_those_of_the_words(lessons: tuple[Lesson, ...]) -> None:
    record = lesson_record(lessons[0])
    assert record["error"] == pytest.approx(-0.5)
    assert record["interval"][0] < 1.0 < record["interval"][1]
    assert [one["measured_step_s"] / one["predicted_step_s"] for one in record["left_out"]] == pytest.approx(
        RATIOS
    )
    assert all(one["low_s"] < one["corrected_step_s"] < one["high_s"] for one in record["left_out"])


def test_the_page_draws_every_plan_before_and_after(lessons: tuple[Lesson, ...]) -> None:
    text = lessons_page(lessons)
    plans = len(RATIOS) + 1
    legend = 2 * len(lessons)
    assert text.count("<circle") == 2 * plans + legend
    # Of twelve dots the six as declared are outside their interval, and the one that nothing corrects.
    assert text.count('fill="none" stroke=') == plans + 1
    assert len(set(re.findall(r'<section id="([^"]+)"', text))) == 2 * len(lessons)


def test_entries_of_the_ledger_are_drawn_by_what_they_rest_on() -> None:
    entries = [
        Entry(
            quantity="step_s",
            subject="p",
            source=f"data sheet{words}",
            predicted=1.0,
            low=0.7,
            high=1.3,
            measured=measured,
        )
        for words, measured in (
            ("", 1.2),
            ("", 2.0),
            (", corrected by 3 measurements", 1.0),
            (", corrected by 4 measurements", 1.1),
        )
    ]
    page = ledger_page(entries)
    rows = re.findall(r'<th scope="row">([^<]+)</th>(.*?)</tr>', page)
    assert [name for name, _ in rows] == ["data sheet", "data sheet, corrected"]
    assert [re.findall(r">([^<]*)</td>", cells) for _, cells in rows] == [
        ["2", "-33.3%", "50%", "+- 30%"],
        ["2", "-4.5%", "100%", "+- 30%"],
    ]


def test_the_command_shows_what_is_there(
    lessons: tuple[Lesson, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert run(["corrections", "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    assert shown == "".join(f"{lesson_text(one)}\n" for one in lessons) + f"wrote {page}\n"
    assert page.read_text() == lessons_page(lessons)
    assert run(["corrections", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "corrections": [json.loads(json.dumps(lesson_record(one))) for one in lessons]
    }


def test_the_command_says_where_nothing_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["corrections"]) == 0
    assert capsys.readouterr().out == (
        f"{weft_home()}: no plan was measured yet; weft plan RUN.toml --measure 4 does it\n"
    )


def test_what_is_no_finished_run_is_a_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["corrections", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"weft: {tmp_path}: not a run directory: it has no run.toml\n"


@pytest.mark.browser
def test_a_browser_draws_it_and_loads_nothing_else(
    lessons: tuple[Lesson, ...], browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text(lessons_page(lessons))
    browser.open(path, width=1200)
    assert browser.complaints() == []
    assert browser.requested() == [path.as_uri()]
    assert browser.run("document.querySelectorAll('#calibration-1 g title').length") == 2 * len(RATIOS)
    assert browser.run("document.querySelectorAll('#coverage-1 tbody tr').length") == 2
    assert browser.run("document.documentElement.scrollWidth <= 1200")
