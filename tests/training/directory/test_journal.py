"""The journal: whole lines, whatever was there before, and the result's step time."""

import json
import math
from pathlib import Path

import pytest
import torch

from weft.errors import RunError
from weft.run.step_result import Numbers, StepResult
from weft.run.streams import Value
from weft.training.directory.event_words import warnings
from weft.training.directory.journal import Journal
from weft.training.directory.process_memory import ProcessMemory
from weft.training.directory.run_directory import RunDirectory
from weft.training.loggers.feed import Feeds


def done(
    step: int, loss: float = 1.5, gradient_norm: float | None = None, **series: list[float]
) -> StepResult:
    figures = {} if gradient_norm is None else {"gradient_norm": gradient_norm}
    rows = {name: Value.of(torch.tensor(row, dtype=torch.float64)) for name, row in series.items()}
    return StepResult(step, Numbers(figures, [torch.tensor([loss])]), series=rows)


def finished(run_dir: Path, times: list[float], *, first: int = 0, writes: bool = True) -> Journal:
    journal = Journal(run_dir, writes=writes)
    for step, step_s in enumerate(times, first):
        journal.step(done(step), step_s=step_s)
    journal.finish(
        tokens_per_step=100,
        memory=[{"max_rss_bytes": 1}, {"max_rss_bytes": 2}],
        first_loss=5.0,
        final_loss=2.0,
        steps=len(times),
    )
    return journal


def result(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "result.json").read_text())


@pytest.mark.parametrize(
    ("times", "expected"),
    [([9.0] * 5 + [1.0, 2.0, 3.0], 2.0), ([9.0] * 5 + [2.0], 2.0), ([9.0, 8.0, 3.0], 3.0), ([4.0], 4.0)],
)
def test_the_step_time_is_the_median_after_the_warm_up(
    tmp_path: Path, times: list[float], expected: float
) -> None:
    finished(tmp_path, times)
    assert result(tmp_path)["measured_step_s"] == expected
    assert result(tmp_path)["tokens_per_s"] == 100 / expected
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_resumed_run_counts_the_steps_before_it(tmp_path: Path) -> None:
    finished(tmp_path, [9.0] * 5 + [1.0, 2.0, 3.0])
    finished(tmp_path, [5.0, 5.0, 5.0], first=7)
    assert result(tmp_path)["measured_step_s"] == 5.0
    assert [row["step"] for row in RunDirectory(tmp_path).metrics()] == list(range(10))


def test_a_torn_line_is_ended_before_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "step_s": 1.0}\n{"step": 1, "st')
    finished(tmp_path, [2.0], first=1)
    assert [row["step_s"] for row in RunDirectory(tmp_path).metrics()] == [1.0, 2.0]


def test_totals_of_methods_stand_beside_the_loss(tmp_path: Path) -> None:
    journal = Journal(tmp_path, writes=True)
    for step, other in enumerate((2.5, math.nan)):
        shares = [torch.tensor([0.5, other]), torch.tensor([1.0, 0.25])]
        journal.step(StepResult(step, Numbers(shares=shares), shared=("auxiliary_loss",)), step_s=1.0)
    journal.flush()
    found = [(row["loss"], row["auxiliary_loss"]) for row in RunDirectory(tmp_path).metrics()]
    assert found == [(1.5, 2.75), (1.5, None)]


def test_a_step_is_written_when_the_next_one_is_done(tmp_path: Path) -> None:
    journal = Journal(tmp_path, writes=True)
    journal.step(done(0), step_s=1.0)
    assert not (tmp_path / "metrics.jsonl").exists()
    journal.step(done(1), step_s=1.0)
    assert [row["step"] for row in RunDirectory(tmp_path).metrics()] == [0]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_error(tmp_path: Path, loss: float) -> None:
    journal = Journal(tmp_path, writes=True)
    journal.step(done(3, loss), step_s=1.0)
    with pytest.raises(RunError, match="step 3"):
        journal.flush()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_replica_without_a_finite_loss_is_an_event_where_others_go_on_by_themselves(tmp_path: Path) -> None:
    journal = Journal(tmp_path, writes=True)
    for step, losses in enumerate(([0.5, 0.0, math.nan, 0.25], [0.5, 0.0, 0.5, 0.5])):
        shares = [torch.tensor([loss]) for loss in losses]
        journal.step(StepResult(step, Numbers(shares=shares), independent=True), step_s=1.0)
    journal.flush()
    assert [row["step"] for row in RunDirectory(tmp_path).metrics()] == [1]
    [line] = warnings(RunDirectory(tmp_path).events(), 0.0)
    assert line.startswith("step 0: the loss of ranks [2] is not finite")
    lost = Numbers(shares=[torch.tensor([math.nan]), torch.tensor([0.0])])
    journal.step(StepResult(2, lost, independent=True), step_s=1.0)
    with pytest.raises(RunError, match="step 2: the loss is nan"):
        journal.flush()


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    finished(tmp_path, [1.0], writes=False).event("anything")
    assert list(tmp_path.iterdir()) == []


def test_the_norm_is_written_and_a_step_left_out_is_an_event(tmp_path: Path) -> None:
    journal = Journal(tmp_path, writes=True)
    journal.step(done(0, gradient_norm=2.0), step_s=1.0)
    journal.step(done(1, math.nan, math.inf), step_s=1.0)
    journal.step(done(2, gradient_norm=3.0), step_s=1.0)
    journal.flush()
    rows = RunDirectory(tmp_path).metrics()
    assert [(row["step"], row["gradient_norm"]) for row in rows] == [(0, 2.0), (2, 3.0)]
    [event] = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["event"], event["step"], event["gradient_norm"]) == ("left out", 1, "inf")


def test_rows_of_numbers_are_written_without_what_json_lacks_and_kept_from_loggers(tmp_path: Path) -> None:
    fed: list[dict[str, float]] = []

    class Fed(Feeds):
        def _put(self, record: dict[str, float]) -> None:
            fed.append(record)

    journal = Journal(tmp_path, writes=True)
    journal.report_to(Fed())
    journal.step(done(0, norms=[1.0, math.inf, 0.1]), step_s=1.0)
    journal.flush()
    [row] = RunDirectory(tmp_path).metrics()
    assert row["norms"] == [1.0, None, 0.1]
    assert fed[0]["step"] == 0
    assert "norms" not in fed[0]


def test_a_run_of_which_every_step_was_left_out_has_failed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, writes=True)
    journal.step(done(0, math.nan, math.nan), step_s=1.0)
    with pytest.raises(RunError, match="every step was left out"):
        journal.finish(tokens_per_step=1, memory=[{"max_rss_bytes": 1}])


def test_the_memory_of_accelerators_is_told_beside_that_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.max_memory_allocated", lambda device: 7_000)
    monkeypatch.setattr("torch.accelerator.reset_peak_memory_stats", lambda device: None)
    device = torch.device("cuda:0")
    memory = ProcessMemory(device)
    journal = Journal(tmp_path, writes=True, memory=memory)
    journal.step(done(0), step_s=1.0)
    journal.finish(tokens_per_step=1, memory=[memory.peaks(), memory.peaks()])
    (row,) = RunDirectory(tmp_path).metrics()
    assert row["max_device_bytes"] == 7_000
    assert row["max_rss_bytes"] == row["tensor_bytes"] + row["library_bytes"] > 10**7
    assert result(tmp_path)["max_device_bytes"] == [7_000, 7_000]
    assert "max_device_bytes" not in ProcessMemory(torch.device("cpu")).peaks()
