"""The page of a report: one small file, the same every time, in which no name does harm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from web.plans import branches
from web.samples import HOSTILE, sample_report

from weft.web.charts.picture import STYLE
from weft.web.pages.page import json_for_script, policy_hash
from weft.web.pages.report import report_html, write_report
from weft.web.rows.stage_graph import stage_graph


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.lists(inner), max_leaves=8))
def test_embedded_json_reads_back_and_cannot_end_its_element(record: Any) -> None:
    text = json_for_script(record)
    assert json.loads(text) == record
    assert not set("<>&") & set(text)


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


def test_stages_that_form_a_graph_are_drawn() -> None:
    text = report_html(dataclasses.replace(sample_report(), stage_graph=stage_graph(branches())))
    assert text.count('<section id="stage-graph"') == 1
    assert text.count("the slowest stage") == 1
    # The page admits the picture's styles.
    policy = text.split("Content-Security-Policy", 1)[1].split(">", 1)[0]
    assert policy_hash(STYLE) in policy
    assert "stage-graph" not in report_html(sample_report())
