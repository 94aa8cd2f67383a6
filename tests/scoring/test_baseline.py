"""The baseline is what anybody reckons on paper, and stands last in the table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from scoring.rows import ROW

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.scoring.score import score
from weft.web.pages.score import score_rows

MODEL = ModelConfig(
    name="small",
    family="llama",
    layers=4,
    hidden=512,
    heads=8,
    key_value_heads=8,
    feed_forward=1536,
    vocabulary=32000,
    sequence=512,
)


def test_it_knows_parameters_and_tokens_and_no_layout(tmp_path: Path) -> None:
    layouts = ({}, {"tp": "2"}, {"recompute": "full"}, {"micro_batch_size": "4"})
    out_of_memory = {"status": "oom", "measured_step_s": ""}
    columns = [*ROW, "tp", "recompute", "micro_batch_size", "status"]
    with (tmp_path / "m.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(ROW | more for more in (*layouts, out_of_memory))
    scores = score(tmp_path / "m.csv")
    expected = 6 * layer_graph(MODEL).parameters() * 32 * 512 / (0.45 * 4 * 312e12)
    assert [one.plain_s for one in scores.rows.values()] == pytest.approx([expected] * 5)
    plain = scores.plain
    assert (plain.n, plain.oom_missed, plain.oom_false) == (4, 1, 0)
    assert plain.coverage is plain.half_width is plain.spearman is None
    assert plain.mape == pytest.approx(1 - expected / 0.1)
    assert scores.as_record()["baseline"] == plain.as_record()
    assert list(score_rows(scores))[-1][0] == "6N at 45 %"
