"""What a report shows: the steps it picks, its table of kinds, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web.samples import measured_steps, sample_program, sample_report

from weft.errors import InputError
from weft.web.pages.report_data import ReportData, chosen_steps, kind_rows


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
