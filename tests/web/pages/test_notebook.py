"""A plan in a notebook: well-formed, every stage, its memory, and nothing that a name could smuggle in."""

from __future__ import annotations

from xml.etree import ElementTree

from small_plans import make_plan, tiny
from web.samples import HOSTILE

import weft
from weft.describe.plan import Plan
from weft.web.pages.plan import MAXIMUM_STAGES, plan_html


def rows_of(html: str) -> list[list[str]]:
    return [[cell.text or "" for cell in row] for row in ElementTree.fromstring(html).iter("tr")]


def test_stages_memory_and_a_step_are_shown() -> None:
    planned = weft.plan(model="gpt-1m", on="4xt4", global_batch=16, pp=2, dp=2, schedule="1f1b")
    html = planned._repr_html_()
    head, *rows = rows_of(html)
    assert head[:3] == ["stage", "layers", "ranks"]
    assert len(rows) == len(planned.plan.stages)
    assert {row[2] for row in rows} == {"0-1", "2-3"}
    for row in rows:
        assert row[4].endswith("B")
        assert row[5].endswith("%")
    assert html.count("<svg") == 1
    assert f"gpt-1m on {planned.plan.cluster}" in html


def html_of(planned: weft.Planned, plan: Plan, *, title: str) -> str:
    cluster = planned.job.problem.job.cluster
    return plan_html(plan, planned.prediction, cluster, planned.simulate(), title=title)


def test_names_stay_text() -> None:
    planned = weft.plan(model="gpt-1m", on="2xt4", global_batch=8)
    html = html_of(planned, planned.plan, title=HOSTILE)
    assert ElementTree.fromstring(html).find("p/b").text == HOSTILE


def test_of_many_stages_the_outer_ones_are_shown() -> None:
    planned = weft.plan(model="gpt-1m", on="2xt4", global_batch=8)
    plan = make_plan(tiny(layers=2 * MAXIMUM_STAGES - 2), loops=2 * MAXIMUM_STAGES)
    html = html_of(planned, plan, title="many")
    rows = rows_of(html)
    assert len(rows) == 1 + MAXIMUM_STAGES + 1
    assert rows[1 + MAXIMUM_STAGES // 2] == [f"{MAXIMUM_STAGES} more stages"]
    assert rows[1][:2] == ["0", "0"]
    assert rows[-1][0] == str(2 * MAXIMUM_STAGES - 1)


def test_neighbouring_ranks_are_joined() -> None:
    planned = weft.plan(model="gpt-1m", on="16xt4", global_batch=16, pp=1, dp=16, schedule="1f1b")
    (row,) = rows_of(planned._repr_html_())[1:]
    assert row[2] == "0-15"
