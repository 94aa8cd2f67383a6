"""A run that tells norms of micro-batches: recorded, reported, compared, and resumed to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import WorkerPool
from stopped_runs import text_run, through_and_stopped

from weft.cli.main import run
from weft.describe.run_file import load_run
from weft.errors import InputError
from weft.planning.planned import plan_run

RUN = """
[report]
micro_batch_norms = true
"""


def norms(directory: Path) -> list[list[float]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["micro_batch_norms"] for row in rows]


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_a_resumed_run_tells_the_same_and_ends_with_the_same_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], worker_pool: WorkerPool
) -> None:
    whole, parts = through_and_stopped(worker_pool, tmp_path, text_run(tmp_path, RUN), steps=4, stop=2)
    assert [len(row) for row in norms(whole)] == [4] * 4
    assert norms(parts) == norms(whole)
    assert '<section id="micro-batch-norms"' in (parts / "report.html").read_text()
    capfd.readouterr()
    assert run(["compare", str(parts), "--json"]) == 0
    assert "micro_batch_norms" in capfd.readouterr().out


def test_copies_of_a_weight_on_several_stages_are_refused_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "tied.toml"
    path.write_text(text_run(tmp_path, RUN).replace("gpt-1m", "gpt2"))
    with pytest.raises(InputError) as refused:
        plan_run(load_run(path))
    [line] = str(refused.value).splitlines()
    assert "micro-batch-norms: 2 stages have a weight in common" in line
    assert "nearest pp: 1" in line
