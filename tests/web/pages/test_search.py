"""The page of `weft plan --report`: a dot for every layout, and nothing that harms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from web.browser import Browser
from web.plans import searched

from weft.describe.run_file import run_of_keywords
from weft.planning.advice import advised, mapped
from weft.planning.planned import plan_run
from weft.planning.planners import Verdict
from weft.planning.what_if import what_if
from weft.training.trials import Trial, TrialOutcome
from weft.web.pages.search import plan_page


def page() -> str:
    job = searched()
    assert job.ranking is not None
    forecasts = what_if(job, "uniform", ["memory 40 GB"])
    first, second = job.ranking.fitting[:2]
    trials = [
        Trial(candidate=first, outcome=TrialOutcome.MEASURED, steps=10, seconds=(1.0, 1.2, 1.1)),
        Trial(candidate=second, outcome=TrialOutcome.OUT_OF_MEMORY, steps=10, reason="CUDA out of memory"),
    ]
    return plan_page(job, advised(job.ranking, 12), forecasts, trials)


def test_every_layout_with_a_bound_is_a_dot_and_rings_were_not_simulated() -> None:
    job, text = searched(), page()
    assert job.ranking is not None
    points = mapped(job.ranking)
    kinds = {verdict: [one for one in points if one.candidate.verdict is verdict] for verdict in Verdict}
    legend = sum(bool(some) for some in kinds.values())
    assert text.count("<circle") == len(points) + legend
    # The legend has a ring where all dots of a kind are rings.
    rings = sum(not one.simulated for one in points)
    hollow = sum(bool(some) and not any(one.simulated for one in some) for some in kinds.values())
    assert text.count('fill="none" stroke=') == rings + hollow
    refused = [one for one in job.ranking.candidates if one.verdict is Verdict.REFUSED]
    assert len(points) == len(job.ranking.candidates) - len(refused)
    best = job.ranking.fitting[0]
    assert f"<title>{best.layout}: " in text
    assert "a100-80gb</text>" in text
    assert text.count(">best plan</text>") == 1
    assert re.search(
        r'class="weft-mark"[^>]*/><text[^>]*>best plan</text><title>' + re.escape(str(best.layout)), text
    )
    assert text.count("<script") == 1


def test_what_is_mapped_is_a_lower_bound_and_can_be_cut() -> None:
    ranking = searched().ranking
    assert ranking is not None
    points = mapped(ranking)
    simulated = [one for one in points if one.simulated]
    assert points[: len(simulated)] == tuple(simulated)
    assert all(one.peak_bytes > 0 and one.step_s > 0 for one in points)
    bounds = [one.step_s for one in points[len(simulated) :]]
    assert bounds == sorted(bounds)
    most = len(simulated) + 3
    assert mapped(ranking, most) == points[:most]


def test_tables_say_forecasts_and_trials() -> None:
    text = re.sub(r"<[^>]+>", " ", page())
    assert "On another cluster" in text
    assert "memory 40 GB" in text
    assert "Measured on this machine" in text
    assert "out of memory" in text


@pytest.mark.browser
def test_a_browser_draws_it_and_loads_nothing_else(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "plans.html"
    path.write_text(page())
    browser.open(path, width=1200)
    assert browser.complaints() == []
    assert browser.requested() == [path.as_uri()]
    inside = "(c) => c.cx.baseVal.value > 0 && c.cx.baseVal.value < c.ownerSVGElement.viewBox.baseVal.width"
    assert browser.run(f"[...document.querySelectorAll('#map circle')].every({inside})")
    assert browser.run("document.querySelectorAll('#plans tbody tr').length") == 12
    assert browser.run("document.documentElement.scrollWidth <= 1200")


def test_a_device_far_larger_than_all_plans_is_out_of_sight() -> None:
    run = run_of_keywords(
        model="gpt-1m",
        on="1xa100-80gb",
        global_batch=4,
        sequence=32,
        precision="fp32",
        pins={"micro_batch_size": 1},
    )
    job = plan_run(run)
    assert job.ranking is not None
    assert "a100-80gb</text>" not in plan_page(job, advised(job.ranking, 3))
