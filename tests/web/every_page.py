"""One page of each kind, as its command writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from doors.job_traces import even, slowed
from web.lessons import learned
from web.plans import branches, searched, small_curve, two_stages
from web.samples import sample_report

from weft.doors.trace.job.losses import losses_of
from weft.doors.trace.job.operations import operations_of
from weft.planning.advice import advised
from weft.planning.report_sections import ChartLine, Section, SectionChart
from weft.planning.what_if import what_if
from weft.predict.ledger import Entry
from weft.web.pages.calibration import ledger_page, lessons_page
from weft.web.pages.curve import curve_page
from weft.web.pages.job import job_page
from weft.web.pages.plan import show_page
from weft.web.pages.report import report_html
from weft.web.pages.search import plan_page
from weft.web.rows.stage_graph import stage_graph


def report() -> str:
    curves = SectionChart((ChartLine("largest", [(0, 4.0), (1, 9.0)]),), "step")
    section = Section("norms", "Norms", [("steps", "2")], curves)
    graph = stage_graph(branches())
    return report_html(dataclasses.replace(sample_report(), sections=(section,), stage_graph=graph))


def search() -> str:
    job = searched()
    assert job.ranking is not None
    return plan_page(job, advised(job.ranking, 6), what_if(job, "uniform", ["memory 40 GB"]))


def ledger() -> str:
    entry = Entry(
        quantity="step_s", subject="p", source="data sheet", predicted=1.0, low=0.7, high=1.3, measured=1.2
    )
    return ledger_page([entry])


def curve() -> str:
    return curve_page(small_curve(), (4, 64, 4096), 512, ["assumed precision: fp16"])


PAGES: Mapping[str, Callable[[], str]] = {
    "report": report,
    "plan": lambda: show_page(two_stages()),
    "plan of a graph": lambda: show_page(branches()),
    "search": search,
    "curve": curve,
    "corrections": lambda: lessons_page(learned()),
    "ledger": ledger,
    "job": lambda: job_page(losses_of(operations_of(slowed(even(), 1.4, stage=2, replica=1), "job"))),
}
