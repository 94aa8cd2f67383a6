"""A plan in words."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from web.plans import planned, two_stages

from weft.cli.tables.plan import stages_table
from weft.describe.layout_text import counts_text
from weft.web.pages.plan import show_page
from weft.web.pages.report import plan_in_words
from weft.web.rows.plan import batch_text, ranks_text, spans, stage_names, stage_rows


@given(st.sets(st.integers(0, 60)))
def test_spans_say_every_number_once(numbers: set[int]) -> None:
    said: list[int] = []
    for part in filter(None, spans(sorted(numbers)).split(", ")):
        first, _, last = part.partition("-")
        said.extend(range(int(first), int(last or first) + 1))
    assert said == sorted(numbers)


def test_ranks_are_counted_where_they_are_not_neighbours() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(4)) == "ranks 0-3"
    assert ranks_text([0, 4, 8, 12]) == "ranks 0, 4, 8, 12 (4)"
    assert ranks_text(range(0, 64, 8)) == "ranks 0, 8, ... (8)"


def test_stages_have_the_same_names_in_terminals_pages_and_reports() -> None:
    job = two_stages()
    expected = ["embedding ... block.0", "block.1 ... head"]
    names = [column for column in stages_table(job).columns if column.header == "layers"]
    assert [list(column.cells) for column in names] == [expected]
    page = re.findall(r"<td>([^<]*(?:block|head)[^<]*)</td>", show_page(job))
    assert page == expected
    report = [text for name, text in plan_in_words(job) if name.startswith("stage")]
    assert report == ["embedding ... block.0, ranks 0-1", "block.1 ... head, ranks 2-3"]


def test_neighbouring_stages_on_the_same_ranks_share_a_row() -> None:
    job = planned(pp=1, dp=2, schedule="depth-first", loops=3)
    graph, cluster = job.problem.job.graph, job.problem.job.cluster
    assert len(job.plan.stages) == 3
    (row,) = stage_rows(job.plan, job.prediction, cluster, graph.layers)
    counts = counts_text([len(stage.layers) for stage in job.plan.stages])
    assert row[:3] == ("0-2", f"embedding ... head ({counts})", "0-1")
    assert len(stage_names(job.plan, graph.layers)) == 3


def test_samples_without_tokens_are_only_counted() -> None:
    plan = two_stages().plan
    assert batch_text(plan) == f"{plan.global_batch} samples of {plan.sequence} tokens"
    assert batch_text(plan.model_copy(update={"sequence": 1})) == f"{plan.global_batch} samples"
