"""The live page in a real browser, beside a run that grows: what it shows, and that it keeps up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from growing_runs import GrowingRun, growing
from live_server import LiveServer
from web.axe import serious_violations
from web.browser import Browser
from web.contrast import faint_texts

from weft.watch import newest_steps
from weft.watch import server as server_module

pytestmark = pytest.mark.browser

LIMIT_S = 60.0
# The first figure is the step.
STEPS = "document.querySelector('.tiles .value')?.textContent"
# What scrolls the tables of ranks and of instructions, where they are wider than their cards.
# Cards that begin a row of the grid whose right end stays empty.
ROWS_WITH_A_GAP = """[...document.querySelectorAll('.columns > section')].filter((one, _, all) => {
  const edges = (other) => other.getBoundingClientRect();
  const row = all.filter((other) => edges(other).top === edges(one).top);
  return Math.max(...row.map((other) => edges(other).right)) < edges(one.parentElement).right - 2;
}).map((one) => one.ariaLabel)"""
TABLES = "[...document.querySelectorAll('table.late')].map((one) => one.parentElement)"
CONNECTION = "document.getElementById('connection').textContent"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GrowingRun]]:
    for name in ("POLL_S", "LIST_POLL_S"):
        monkeypatch.setattr(server_module, name, 0.05)
    for name in ("LOOK_INTERVAL_S", "PAUSE"):
        monkeypatch.setattr(newest_steps, name, 0.0)
    with growing(tmp_path / "runs", "first", "<b>second") as grown:
        yield grown


@pytest.fixture
def server(runs: list[GrowingRun]) -> Iterator[LiveServer]:
    server = LiveServer(runs[0].path.parent)
    yield server
    server.close()


@pytest.fixture
def show(browser: Browser, server: LiveServer) -> Iterator[Callable[..., Browser]]:
    def open_page(path: str, width: int = 1280, scheme: str = "light") -> Browser:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.call("Emulation.setEmulatedMedia", features=features)
        browser.open(f"http://127.0.0.1:{server.port}{path}?token={server.token}", width=width)
        return browser

    yield open_page
    browser.call("Emulation.setEmulatedMedia", features=[])
    browser.call("Page.navigate", url="about:blank")


def wait_until(browser: Browser, expression: str, wanted: object) -> None:
    deadline = time.monotonic() + LIMIT_S
    while (found := browser.run(expression)) != wanted:
        assert time.monotonic() < deadline, f"{expression} is {found!r}"
        time.sleep(0.05)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_run_is_shown_whole(
    show: Callable[..., Browser], runs: list[GrowingRun], width: int, scheme: str
) -> None:
    runs[0].train(12, late_rank=2)
    runs[0].tell("checkpoint", step=10)
    browser = show("/run/first", width, scheme)
    wait_until(browser, STEPS, "12/50")
    assert browser.complaints() == []
    assert browser.run(CONNECTION).startswith("live")
    sections = browser.run("[...document.querySelectorAll('section')].map((one) => one.ariaLabel)")
    assert sections == [
        "The newest step, predicted above measured", "Lateness of ranks", "Latest instructions",
        "Loss", "Step time", "Tokens per second", "Memory", "Events",
    ]  # fmt: skip
    assert serious_violations(browser) == []
    assert faint_texts(browser) == []
    buttons = "[...document.querySelectorAll('button.save')].map((one) => one.closest('section').ariaLabel)"
    assert sorted(browser.run(buttons)) == sorted([sections[0], *sections[3:7]])
    # Nothing is wider than the page; wide tables scroll inside their cards.
    assert browser.run("document.documentElement.scrollWidth") <= width
    whole = browser.run(f"{TABLES}.map((one) => one.scrollWidth <= one.clientWidth)")
    assert whole == ([True, True] if width == 1280 else [False, True])
    assert browser.run(ROWS_WITH_A_GAP) == []
    # Equal ranks share their lanes in the prediction.
    blocks = "document.querySelectorAll('#lanes-%s .instruction').length > 8"
    assert browser.run(blocks % "predicted")
    assert browser.run(blocks % "measured")
    late = browser.run(
        "[...document.querySelectorAll('.late')[0].tBodies[0].rows].map((row) => row.cells[1].textContent)"
    )
    assert len(late) == 4
    assert all(text.startswith("+") for text in late)
    events = browser.run("[...document.querySelectorAll('.notes span')].map((one) => one.textContent)")
    assert events == ["checkpoint after 10 steps", "started"]
    origin = "/".join(browser.run("location.href").split("/")[:3])
    assert {url for url in browser.requested() if not url.startswith(("data:", origin))} == set()


def test_the_page_grows_with_the_run(show: Callable[..., Browser], runs: list[GrowingRun]) -> None:
    runs[0].train(3)
    browser = show("/run/first")
    wait_until(browser, STEPS, "3/50")
    panel = "[...document.querySelectorAll('.panel-title')].at(-1)?.firstChild.textContent"
    wait_until(browser, panel, "measured, step 2")
    browser.run("document.querySelector('[aria-label=\"Zoom in\"]').click()")
    zoomed = browser.run("document.querySelector('.time-axis').textContent")
    runs[0].train(2)
    wait_until(browser, panel, "measured, step 4")
    assert browser.run(STEPS) == "5/50"
    # The part of the step that the user looks at stays.
    assert browser.run("document.querySelector('.time-axis').textContent") == zoomed
    runs[0].tell("hang", problem="rank 1 waits for <rank> 2", step=4, ranks=[2])
    wait_until(browser, "document.querySelector('.notes .bad')?.textContent", "rank 1 waits for <rank> 2")
    assert browser.complaints() == []


def test_a_step_that_is_trained_again_replaces_what_followed_it(
    show: Callable[..., Browser], runs: list[GrowingRun]
) -> None:
    runs[0].train(30)
    browser = show("/run/first")
    wait_until(browser, STEPS, "30/50")
    runs[0].resume(10)
    runs[0].train(1)
    wait_until(browser, STEPS, "11/50")
    axis = "[...document.querySelectorAll('[aria-label=Loss] svg text')].map((one) => one.textContent)"
    assert "10" in browser.run(axis)
    assert "20" not in browser.run(axis)


def test_a_lost_connection_is_told_and_comes_back(
    browser: Browser, show: Callable[..., Browser], runs: list[GrowingRun], server: LiveServer
) -> None:
    runs[0].train(3)
    show("/run/first")
    wait_until(browser, STEPS, "3/50")
    server.close()
    wait_until(browser, CONNECTION, "connection lost, trying again")
    runs[0].train(2)
    again = LiveServer(runs[0].path.parent, server.port, server.token)
    wait_until(browser, STEPS, "5/50")
    assert browser.run(CONNECTION).startswith("live")
    path = "document.querySelector('[aria-label=Loss] path.series').getAttribute('d')"
    # Five points, each once.
    assert len(browser.run(path).replace("M", "L").split("L")) == 6
    again.close()


def test_two_runs_are_chosen_by_keyboard_and_shown_side_by_side(
    show: Callable[..., Browser], runs: list[GrowingRun]
) -> None:
    runs[0].train(5)
    runs[1].train(9)
    browser = show("/")
    boxes = "document.querySelectorAll('.runs input')"
    wait_until(browser, f"{boxes}.length", 2)
    assert browser.run("document.querySelector('button').disabled")
    for place in range(2):
        browser.run(f"{boxes}[{place}].focus()")
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=" ", text=" ", code="Space")
        browser.call("Input.dispatchKeyEvent", type="keyUp", key=" ", code="Space")
    browser.run("document.querySelector('button').click()")
    row = "[...(document.querySelector('.side-by-side tbody tr')?.cells ?? [])].map((one) => one.textContent)"
    wait_until(browser, row, ["step", "9/50broken off", "5/50broken off"])
    # A name is text, whatever it looks like.
    assert browser.run("document.querySelectorAll('.side-by-side b').length") == 0
    assert "<b>second" in browser.run("document.querySelector('.side-by-side thead').textContent")
    curves = "document.querySelectorAll('[aria-label=\"Step time\"] path.series').length"
    wait_until(browser, curves, 2)
    assert browser.complaints() == []
