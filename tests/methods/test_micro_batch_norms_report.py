"""The section about norms of micro-batches: what it says of recorded steps, and what these cost."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asked_methods import TELLS_NORMS
from predict.cost.machines import MODEL, cluster
from predict.plans import plan_of
from web.samples import sample_report

from weft.describe.families import layer_graph
from weft.describe.run_file import parse_run
from weft.methods.micro_batch_norms.kinds import MICRO_BATCH_NORMS
from weft.methods.micro_batch_norms.report import SECTION, norms_of
from weft.planning.compile import compile_plan
from weft.planning.report_sections import Section
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.predict.predict import predict
from weft.program.kinds import BACKWARD, BACKWARD_WEIGHT
from weft.web.pages.report import report_html

GRAPH = layer_graph(MODEL)
METRICS = [
    {"step": 0, "loss": 3.0, "micro_batch_norms": [4.0, 2.0, 3.0]},
    {"step": 1, "loss": 2.0},
    {"step": 2, "loss": 2.0, "micro_batch_norms": [1.0, None, 9.0]},
    {"step": 3, "loss": 2.0, "micro_batch_norms": [None, None, None]},
]
PLANNED: Any = SimpleNamespace(plan=SimpleNamespace(micro_batches=3))


def section() -> Section:
    return Section(
        SECTION.name, SECTION.title, SECTION.rows(PLANNED, METRICS), SECTION.chart(PLANNED, METRICS)
    )


def test_steps_are_told_by_median_ninetieth_and_largest() -> None:
    first, last = norms_of(METRICS)
    assert (first.step, first.median, first.largest, first.micro_batch) == (0, 3.0, 4.0, 0)
    assert first.high == pytest.approx(3.8)
    assert (last.step, last.median, last.largest, last.micro_batch) == (2, 5.0, 9.0, 2)
    rows = dict(section().rows)
    assert rows["steps"] == "2, of 3 micro-batches each"
    assert rows["largest of all"] == "9, micro-batch 2 of step 2"
    assert rows["largest of the last step"] == "9, micro-batch 2"


def test_a_run_without_norms_has_no_section() -> None:
    assert SECTION.rows(PLANNED, METRICS[1:2]) == []
    assert SECTION.chart(PLANNED, METRICS[1:2]) is None


def test_a_section_without_a_chart_is_rows_alone() -> None:
    bare = section()._replace(chart=None, name="bare")
    text = report_html(dataclasses.replace(sample_report(), sections=(bare,)))
    assert '<section id="bare" aria-labelledby="bare-title"><h2 id="bare-title">' in text
    assert 'id="bare-title">Gradient norms of micro-batches</h2><div class="scroll"' in text


@pytest.mark.parametrize(("schedule", "kind"), [("1f1b", BACKWARD), ("zb-h1", BACKWARD_WEIGHT)])
def test_norms_cost_a_look_at_each_gradient_and_a_meeting(schedule: str, kind: int) -> None:
    where = cluster()
    plan = plan_of(GRAPH, where, pp=2, dp=2, schedule=schedule).model_copy(update={"sharding": "zero-1"})
    told = plan.model_copy(update={"methods": TELLS_NORMS})
    plain_s, told_s = (
        predict(CostModel(graph=GRAPH, cluster=where), one, compile_plan(one, GRAPH)).prediction.step_s
        for one in (plan, told)
    )
    assert plain_s < told_s < 1.1 * plain_s
    without, program = compile_plan(plan, GRAPH), compile_plan(told, GRAPH)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, told).costs
    meeting_s = (
        Network(cluster=where, machine=None).all_reduce(tuple(range(4)), 8 * plan.micro_batches).seconds
    )
    rows = program.columns.kind == MICRO_BATCH_NORMS
    assert costs.occupancy[rows] == pytest.approx(meeting_s * 1e9, abs=1)
    before = price(CostModel(graph=GRAPH, cluster=where), without, plan).costs.occupancy[
        without.columns.kind == kind
    ]
    added = costs.occupancy[program.columns.kind == kind] - before
    assert (added > 0).all()
    other = np.isin(without.columns.kind, [kind], invert=True)
    kept = program.columns.kind != MICRO_BATCH_NORMS
    assert np.array_equal(
        price(CostModel(graph=GRAPH, cluster=where), without, plan).costs.occupancy[other],
        costs.occupancy[kept][other],
    )


def test_the_run_file_asks_for_it() -> None:
    record = {"model": {"preset": "gpt-1m"}, "report": {"micro_batch_norms": True}}
    assert parse_run(record).report.methods == TELLS_NORMS
    assert parse_run({"model": {"preset": "gpt-1m"}}).report.methods == ()
