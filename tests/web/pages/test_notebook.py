"""A plan in a notebook: well-formed, every stage, its memory, and nothing that a name could smuggle in."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from small_plans import make_plan, tiny
from web.samples import HOSTILE

import weft
from weft.describe.plan import Plan
from weft.web.pages.plan import MAXIMUM_STAGES, plan_html
from weft.web.rows.plan import stage_rows


def rows_of(html: str) -> list[list[str]]:
    return [[cell.text or "" for cell in row] for row in ElementTree.fromstring(html).iter("tr")]


def test_stages_memory_and_a_step_are_shown() -> None:
    planned = weft.plan(
        model="gpt-1m", on="4xt4", precision="fp32", global_batch=16, pp=2, dp=2, schedule="1f1b"
    )
    html = planned._repr_html_()
    head, *rows = rows_of(html)
    assert head[:3] == ["stage", "layers", "ranks"]
    assert len(rows) == len(planned.plan.stages)
    assert rows[0][1] == "embedding ... block.2"
    assert {row[2] for row in rows} == {"0-1", "2-3"}
    for row in rows:
        assert row[4].endswith("B")
        assert row[5].endswith("%")
    assert html.count("<svg") == 1
    assert f"gpt-1m on {planned.plan.cluster}" in html


def html_of(planned: weft.Planned, plan: Plan, *, title: str) -> str:
    job = planned.job.problem.job
    layers = [job.graph.layers[min(place, 2)] for place in range(len(plan.stages) + 2)]
    stages = stage_rows(plan, planned.prediction, job.cluster, layers)
    return plan_html(plan, planned.prediction, stages, planned.simulate(), title=title)


def test_names_stay_text() -> None:
    planned = weft.plan(model="gpt-1m", on="2xt4", precision="fp32", global_batch=8)
    html = html_of(planned, planned.plan, title=HOSTILE)
    assert ElementTree.fromstring(html).find("p/b").text == HOSTILE


def test_of_many_stages_the_outer_ones_are_shown() -> None:
    planned = weft.plan(model="gpt-1m", on="2xt4", precision="fp32", global_batch=8)
    plan = make_plan(tiny(layers=2 * MAXIMUM_STAGES - 2), pp=2, loops=MAXIMUM_STAGES)
    html = html_of(planned, plan, title="many")
    rows = rows_of(html)
    assert len(rows) == 1 + MAXIMUM_STAGES + 1
    assert rows[1 + MAXIMUM_STAGES // 2] == [f"{MAXIMUM_STAGES} more stages"]
    assert rows[1][:2] == ["0", "embedding"]
    assert rows[-1][0] == str(2 * MAXIMUM_STAGES - 1)


def test_neighbouring_ranks_are_joined() -> None:
    planned = weft.plan(
        model="gpt-1m", on="16xt4", precision="fp32", global_batch=16, pp=1, dp=16, schedule="1f1b"
    )
    (row,) = rows_of(planned._repr_html_())[1:]
    assert row[2] == "0-15"


@pytest.mark.parametrize(
    ("on", "pins"),
    [
        ("64xa100-80gb", {"pp": 8, "dp": 8, "schedule": "breadth-first", "global_batch": 512}),
        ("1024xa100-80gb", {"pp": 16, "dp": 64, "schedule": "1f1b", "global_batch": 4096}),
        ("1024xa100-80gb", {"pp": 1, "dp": 1024, "global_batch": 4096}),
    ],
)
def test_outputs_are_small_on_any_cluster(on: str, pins: dict[str, Any]) -> None:
    planned = weft.plan(model="llama-7b", on=on, tp=1, micro_batch_size=1, **pins)
    html = planned._repr_html_()
    assert len(html.encode()) < 200_000
    assert f">ranks 0-{planned.plan.ranks // len({s.replicas for s in planned.plan.stages}) - 1}<" in html
