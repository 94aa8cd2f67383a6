"""What was learned from measured steps on a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from web.browser import Browser
from web.lessons import RATIOS, learned

from weft.predict.ledger import Entry
from weft.web.pages.calibration import clouds_of_lesson, ledger_page, lessons_page

pytestmark = pytest.mark.usefixtures("own_home")


def test_the_page_draws_every_plan_before_and_after() -> None:
    lessons = learned()
    text = lessons_page(lessons)
    plans = len(RATIOS) + 1
    legend = 2 * len(lessons)
    assert text.count("<circle") == 2 * plans + legend
    # Of twelve dots the six as declared are outside their interval, and the one that nothing corrects.
    clouds = [some for lesson in lessons for _, some in clouds_of_lesson(lesson)]
    hollow = sum(not any(one.inside for one in some) for some in clouds)
    assert text.count('fill="none" stroke=') == plans + 1 + hollow
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


@pytest.mark.browser
def test_a_browser_draws_it_and_loads_nothing_else(browser: Browser, tmp_path: Path) -> None:
    lessons = learned()
    path = tmp_path / "page.html"
    path.write_text(lessons_page(lessons))
    browser.open(path, width=1200)
    assert browser.complaints() == []
    assert browser.requested() == [path.as_uri()]
    assert browser.run("document.querySelectorAll('#calibration-1 g title').length") == 2 * len(RATIOS)
    assert browser.run("document.querySelectorAll('#coverage-1 tbody tr').length") == 2
    assert browser.run("document.documentElement.scrollWidth <= 1200")
