"""The record in a report's page: bounded, in one piece, with twins joined by id."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from web.samples import sample_program, sample_report, simulated_step

from weft.timeline.timeline import stream_names
from weft.web.pages import page_record as module
from weft.web.pages.page_record import page_record, thin, timeline_record
from weft.web.pages.report_data import ReportData

values = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(values, max_size=400), st.integers(4, 60))
def test_thinned_curves_keep_ends_extremes_and_order(ys: list[float], maximum: int) -> None:
    points = [(float(x), y) for x, y in enumerate(ys)]
    kept = thin(points, maximum)
    assert len(kept) <= max(maximum + 2, 2)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    finite = [y for y in ys if math.isfinite(y)]
    shown = [y for _, y in kept if y is not None]
    if finite:
        assert min(shown) == min(finite)
        assert max(shown) == max(finite)
    if points:
        assert (kept[0][0], kept[-1][0]) == (points[0][0], points[-1][0])


def test_every_embedded_row_joins_its_twin_by_id() -> None:
    report = sample_report(micro_batches=4)
    record: Any = timeline_record(report)
    predicted = report.predicted
    assert predicted is not None
    ids = record["instructions"]["id"]
    assert ids == sorted({f"{identity:016x}" for identity in predicted.id.tolist()})
    assert [ids[row] for row in record["predicted"]["row"]] == [
        f"{one:016x}" for one in predicted.id.tolist()
    ]
    for step in record["measured"]:
        assert sorted(step["row"]) == list(range(len(ids)))
        assert min(step["start"]) == 0


def test_lanes_are_those_of_the_program() -> None:
    record: Any = timeline_record(sample_report())
    lanes = [(lane["rank"], lane["stream"]) for lane in record["lanes"]]
    names = stream_names()
    assert lanes == sorted(set(lanes), key=lambda lane: (lane[0], names.index(lane[1])))
    assert lanes[0] == (0, "compute")
    assert {rank for rank, _ in lanes} == {0, 1}


def test_wide_timelines_are_cut_to_whole_ranks_and_the_page_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    report = sample_report()
    monkeypatch.setattr(module, "MAXIMUM_ROWS", 500)
    record: Any = timeline_record(report)
    assert (record["ranks"], record["shownRanks"]) == (2, 1)
    assert {lane["rank"] for lane in record["lanes"]} == {0}


def test_an_empty_timeline_is_left_out() -> None:
    empty = simulated_step(sample_program(2), 0)
    empty = empty.take(np.zeros(len(empty), dtype=np.bool_))
    assert page_record(ReportData(run="r", predicted=empty))["timeline"] is None
