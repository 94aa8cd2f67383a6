"""The report in a real browser: what is drawn, how it answers, and that it harms nobody."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from web.browser import Browser
from web.samples import HOSTILE, sample_report

from weft.planning.report_sections import ChartLine, Section, SectionChart
from weft.web.pages.report import write_report
from weft.web.pages.report_data import RankMemory, ReportData

pytestmark = pytest.mark.browser

Open = Callable[..., Browser]

AXIS = "[...document.querySelectorAll('.time-axis text')].map((text) => text.textContent)"
BLOCKS = "document.querySelectorAll('#lanes-%s .instruction').length"


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Open:
    def open_report(report: ReportData | None = None, width: int = 1400) -> Browser:
        path = tmp_path / "report.html"
        write_report(path, report or sample_report())
        browser.open(path, width=width)
        return browser

    return open_report


def centre(browser: Browser, selector: str) -> tuple[float, float]:
    box = browser.run(
        f"(() => {{ const node = document.querySelector({selector!r});"
        " node.scrollIntoView({block: 'center'});"
        " const box = node.getBoundingClientRect();"
        " return [box.left + box.width / 2, box.top + box.height / 2]; })()"
    )
    return box[0], box[1]


def click(browser: Browser, selector: str) -> None:
    x, y = centre(browser, selector)
    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseReleased", x, y, button="left", clickCount=1)


def test_the_page_is_clean_and_alone(show: Open) -> None:
    browser = show()
    assert browser.complaints() == []
    assert [url for url in browser.requested() if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in browser.requested() if url.startswith("file:")]) == 1


def test_every_lane_and_every_instruction_is_drawn_in_both_panels(show: Open) -> None:
    report = sample_report(micro_batches=4)
    browser = show(report)
    assert report.predicted is not None
    streams = 5
    for panel in ("predicted", "measured"):
        assert browser.run(f"document.querySelectorAll('#lanes-{panel} .lane').length") == 2 * streams
        assert browser.run(BLOCKS % panel) == len(report.predicted)


@pytest.mark.parametrize("width", [420, 1400])
def test_nothing_is_wider_than_the_window(show: Open, width: int) -> None:
    browser = show(width=width)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(BLOCKS % "predicted") > 0


def test_zoom_pan_and_reset_move_one_axis_for_both_panels(show: Open) -> None:
    browser = show()
    whole, blocks = browser.run(AXIS), browser.run(BLOCKS % "measured")
    for _ in range(4):
        click(browser, "#zoom-in")
    zoomed = browser.run(AXIS)
    assert zoomed != whole
    assert browser.run(BLOCKS % "measured") < blocks
    assert browser.run(BLOCKS % "predicted") < blocks
    click(browser, "#pan-right")
    assert browser.run(AXIS) != zoomed
    click(browser, "#zoom-reset")
    assert browser.run(AXIS) == whole
    assert browser.run(BLOCKS % "measured") == blocks


def test_wheel_zooms_at_the_pointer_and_double_click_resets(show: Open) -> None:
    browser = show()
    whole = browser.run(AXIS)
    x, y = centre(browser, "#lanes-predicted")
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-600)
    browser.run("new Promise((done) => setTimeout(done, 100))")
    assert browser.run(AXIS) != whole
    for count in (1, 2):
        browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=count)
        browser.mouse("mouseReleased", x, y, button="left", clickCount=count)
    assert browser.run(AXIS) == whole


def test_dragging_zooms_to_the_span(show: Open) -> None:
    browser = show()
    x, y = centre(browser, "#lanes-measured")
    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", x + 100, y, button="left", buttons=1)
    browser.mouse("mouseMoved", x + 200, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 200, y, button="left", clickCount=1)
    first = browser.run(AXIS)[0]
    assert first != "0 s"
    assert browser.run("document.querySelector('.selection')") is None


def test_tooltip_joins_the_twins_and_marks_both(show: Open) -> None:
    browser = show()
    x, y = centre(browser, "#lanes-measured .instruction[data-row]")
    browser.mouse("mouseMoved", x, y)
    text = browser.run("document.getElementById('tooltip').innerText")
    for word in ("rank", "stage", "micro-batch", "predicted", "measured", "duration", "id "):
        assert word in text
    assert browser.run("document.querySelectorAll('.twin').length") == 2
    browser.mouse("mouseMoved", 2, 2)
    assert browser.run("document.getElementById('tooltip').hidden")


def test_the_keyboard_chooses_and_announces_instructions(show: Open) -> None:
    browser = show()
    browser.run("document.getElementById('timeline-view').focus()")
    browser.key("ArrowRight")
    first = browser.run("document.getElementById('announcement').textContent")
    assert first.startswith("forward F0.0, rank 0")
    assert "predicted" in first
    assert "measured" in first
    browser.key("ArrowRight")
    assert browser.run("document.getElementById('announcement').textContent").startswith(
        "forward F0.1, rank 0"
    )
    browser.key("ArrowDown")
    assert "send activation" in browser.run("document.getElementById('announcement').textContent")
    whole = browser.run(AXIS)
    browser.key("+")
    assert browser.run(AXIS) != whole
    browser.key("0")
    assert browser.run(AXIS) == whole


def test_choosing_another_step_draws_it(show: Open) -> None:
    browser = show()
    title = "document.querySelectorAll('.panel-title')[1].textContent"
    before = browser.run(title)
    browser.run(
        "(() => { const select = document.getElementById('step-select'); select.selectedIndex = 0;"
        " select.dispatchEvent(new Event('change')); })()"
    )
    assert browser.run(title) != before
    assert browser.run(title).startswith("measured, step 0")


def test_charts_are_drawn_and_described(show: Open) -> None:
    browser = show()
    for name in ("loss", "step-time", "memory", "live"):
        assert browser.run(f"document.querySelector('#{name} .chart svg').getAttribute('aria-label')")
    x, y = centre(browser, "#loss .chart svg")
    browser.mouse("mouseMoved", x, y)
    assert "training" in browser.run("document.getElementById('tooltip').innerText")


def test_hostile_names_are_shown_and_never_executed(show: Open) -> None:
    report = dataclasses.replace(
        sample_report(run=HOSTILE),
        model=HOSTILE,
        cluster=HOSTILE,
        plan=((HOSTILE, HOSTILE),),
        summary={HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}},
    )
    browser = show(report)
    assert browser.run("document.querySelector('h1').textContent") == HOSTILE
    assert browser.run("document.title").startswith(HOSTILE)
    assert browser.run("window.harmed === undefined")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.complaints() == []
    assert browser.run(BLOCKS % "predicted") > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"measured": None},
        {"predicted": None, "interval": None},
        {"predicted": None, "measured": None, "interval": None},
        {"losses": [(0, math.nan), (1, math.inf), (2, 3.0)], "held_out": (), "memory": ()},
        {"losses": (), "held_out": (), "step_times": (), "summary": {}, "plan": ()},
    ],
    ids=["no-measurement", "no-prediction", "no-timelines", "diverged", "bare"],
)
def test_missing_parts_leave_a_page_without_complaints(show: Open, changes: dict[str, object]) -> None:
    report = dataclasses.replace(sample_report(), **changes)
    browser = show(report)
    assert browser.complaints() == []
    present = report.predicted is not None or report.measured is not None
    assert browser.run("document.getElementById('timeline').hidden") is not present


def test_the_section_of_a_method_draws_its_curves(show: Open) -> None:
    curves = (
        ChartLine("largest", [(0, 4.0), (1, math.nan), (2, 9.0)]),
        ChartLine(HOSTILE, [(0, 1.0), (2, 2.0)]),
    )
    section = Section("norms", HOSTILE, [("steps", "3")], SectionChart(curves, "step"))
    bare = Section("bare", "Rows alone", [("steps", "3")])
    browser = show(dataclasses.replace(sample_report(), sections=(section, bare)))
    assert browser.complaints() == []
    assert browser.run("document.querySelectorAll('#norms .chart path.series').length") == 2
    assert browser.run("document.querySelectorAll('#norms .legend li').length") == 2
    assert browser.run("document.querySelectorAll('#norms th').length") == 1
    label = browser.run("document.querySelector('#norms svg[role=img]').getAttribute('aria-label')")
    assert label.endswith(f"largest from 4 to 9; {HOSTILE} from 1 to 2")
    assert browser.run("document.querySelector('#bare .chart')") is None
    assert browser.run("window.harmed") is None


def test_equal_ranks_of_the_prediction_share_lanes_and_find_their_twins(show: Open) -> None:
    report = sample_report(replicas=2, micro_batches=4)
    browser = show(report)
    lanes = "document.querySelectorAll('#lanes-%s .lane').length"
    assert browser.run(lanes % "measured") == 2 * browser.run(lanes % "predicted")
    names = "[...document.querySelectorAll('#lanes-predicted text.rank')].map((one) => one.textContent)"
    assert browser.run(names) == ["ranks 0, 2 (2)", "ranks 1, 3 (2)"]
    box = browser.run(
        "(() => { const lanes = document.querySelectorAll('#lanes-measured .lane');"
        " lanes[lanes.length - 1].scrollIntoView({block: 'center'});"
        " const blocks = [...document.querySelectorAll('#lanes-measured .instruction')];"
        " const box = blocks.find((one) => one.y.baseVal.value > lanes[9].y.baseVal.value)"
        ".getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    browser.mouse("mouseMoved", *box)
    assert "rank 2" in browser.run("document.getElementById('tooltip').innerText")
    assert browser.run("document.querySelectorAll('.twin').length") == 2


def test_the_keyboard_skips_folded_lanes(show: Open) -> None:
    browser = show(dataclasses.replace(sample_report(replicas=2, micro_batches=4), measured=None))
    browser.run("document.getElementById('timeline-view').focus()")
    browser.key("ArrowRight")
    for _ in range(9):
        browser.key("ArrowDown")
    told = browser.run("document.getElementById('announcement').textContent")
    assert "rank 1" in told


def test_all_ticks_of_an_axis_have_one_unit(show: Open) -> None:
    browser = show(dataclasses.replace(sample_report(), step_times=[(0, 1.4), (1, 0.3), (2, 0.25)]))
    texts = "[...document.querySelectorAll('%s')].map((one) => one.textContent)"
    times = browser.run(texts % "#step-time .chart text[text-anchor=end]")
    assert times[:3] == ["0 s", "0.5 s", "1 s"]
    sizes = browser.run(texts % "#memory .chart text[text-anchor=middle]")
    assert sizes[:3] == ["0 MB", "200 MB", "400 MB"]
    assert {text.split()[1] for text in browser.run(AXIS)} == {"ms"}


def test_memory_is_drawn_once_for_equal_ranks_and_the_rest_is_named(show: Open) -> None:
    memory = [
        RankMemory(
            rank=rank, predicted_bytes=10**8, measured_bytes=10**8 + rank * 10**7, capacity_bytes=10**9
        )
        for rank in range(4)
    ]
    rows = [("together", "100 MB", "130 MB"), ("interpreter and libraries", "-", "500 MB")]
    browser = show(dataclasses.replace(sample_report(), memory=memory, memory_rows=rows))
    label = browser.run("document.querySelector('#memory .chart svg').getAttribute('aria-label')")
    assert label == "ranks 0-3: predicted 100 MB, measured 130 MB"
    assert "interpreter and libraries" in browser.run("document.querySelector('#memory table').innerText")
    assert browser.run("document.querySelectorAll('h2').length") == browser.run(
        "new Set([...document.querySelectorAll('h2')].map((one) => one.textContent)).size"
    )


def test_held_out_losses_are_points_and_no_line(show: Open) -> None:
    browser = show()
    assert browser.run("document.querySelectorAll('#loss path.series').length") == 1
    assert browser.run("document.querySelectorAll('#loss svg[role=img] circle').length") == 3
