from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from web.samples import HOSTILE, measured_steps, sample_program, sample_report, simulated_step

from weft.errors import InputError
from weft.timeline.streams import stream_names
from weft.web import report_data
from weft.web.report import json_for_script, report_html, write_report
from weft.web.report_data import ReportData, chosen_steps, kind_rows, page_record, thin, timeline_record

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


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner), max_leaves=8))
def test_embedded_json_reads_back_and_cannot_end_its_element(record: Any) -> None:
    text = json_for_script(record)
    assert json.loads(text) == record
    assert not set("<>&") & set(text)


@given(st.integers(1, 30))
def test_few_steps_are_embedded_whatever_the_length_of_the_run(steps: int) -> None:
    measured = measured_steps(sample_program(2), steps)
    chosen = chosen_steps(measured)
    assert len(chosen) <= 6
    assert list(chosen) == sorted(chosen)
    assert {0, steps - 1} <= chosen.keys()
    assert sum("median" in reasons for reasons in chosen.values()) == 1


def test_warm_up_steps_are_neither_median_nor_slowest() -> None:
    chosen = chosen_steps(measured_steps(sample_program(2), 30))
    for reason in ("median", "slowest after warm-up"):
        assert next(step for step, reasons in chosen.items() if reason in reasons) >= 5


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
    monkeypatch.setattr(report_data, "MAXIMUM_ROWS", 500)
    record: Any = timeline_record(report)
    assert (record["ranks"], record["shownRanks"]) == (2, 1)
    assert {lane["rank"] for lane in record["lanes"]} == {0}


def test_kind_rows_agree_with_the_timelines() -> None:
    report = sample_report()
    rows = {row.kind: row for row in kind_rows(report)}
    assert rows["forward"].count == 32
    assert rows["forward"].predicted_s == pytest.approx(32 * 9e-3)
    assert rows["forward"].measured_s == pytest.approx(32 * 9e-3, rel=0.1)
    alone = {row.kind: row for row in kind_rows(dataclasses.replace(report, predicted=None))}
    assert alone["forward"].predicted_s is None
    assert alone["forward"].measured_s == pytest.approx(32 * 9e-3, rel=0.2)
    assert kind_rows(ReportData(run="empty")) == []


def test_timelines_of_two_plans_are_refused() -> None:
    report = sample_report()
    assert report.measured is not None
    other = dataclasses.replace(report.measured, plan_id="another")
    with pytest.raises(InputError, match="two plans: 5f1e and another"):
        dataclasses.replace(report, measured=other)


def test_measured_step_is_the_median_after_the_warm_up() -> None:
    times = [(step, 9.0 if step < 5 else float(step)) for step in range(10)]
    assert ReportData(run="r", step_times=times).measured_step_s == 7.0
    assert ReportData(run="r", step_times=times[:2]).measured_step_s == 9.0
    assert ReportData(run="r").measured_step_s is None


def test_the_page_is_one_small_file_written_in_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "report.html"
    write_report(path, sample_report(steps=200))
    text = path.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_names_are_escaped_everywhere() -> None:
    text = report_html(dataclasses.replace(sample_report(run=HOSTILE), plan=((HOSTILE, HOSTILE),)))
    assert "<script>window" not in text
    assert "<img" not in text
    assert text.count("<script") == 2


def test_the_page_is_the_same_every_time() -> None:
    assert report_html(sample_report()) == report_html(sample_report())


def test_an_empty_timeline_is_left_out() -> None:
    empty = simulated_step(sample_program(2), 0)
    empty = empty.take(np.zeros(len(empty), dtype=np.bool_))
    assert page_record(ReportData(run="r", predicted=empty))["timeline"] is None
