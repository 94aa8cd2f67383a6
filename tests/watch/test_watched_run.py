"""News of a run: in any order of looks, a viewer ends with all that a viewer knows who comes last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from growing_runs import GrowingRun, growing

from weft.watch import newest_steps
from weft.watch.newest_steps import StepsOfPlan, late_ranks
from weft.watch.watched_run import News, Seen, WatchedRun
from weft.web.rows.run import BAD


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrowingRun]:
    monkeypatch.setattr(newest_steps, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(newest_steps, "PAUSE", 0.0)
    with growing(tmp_path / "runs", "first") as (grown,):
        yield grown


class Viewer:
    """What a viewer knows who keeps all that is news."""

    def __init__(self, run: WatchedRun) -> None:
        self.run, self.seen = run, Seen()
        self.steps: dict[int, float] = {}
        self.notes: list[str] = []
        self.held_out: dict[int, float] = {}

    def look(self) -> News:
        news = self.run.news(self.seen)
        if news.anew:
            self.steps, self.notes, self.held_out = {}, [], {}
        if news.steps:
            self.steps = {step: loss for step, loss in self.steps.items() if step < news.steps[0].step}
        self.steps |= {one.step: one.loss for one in news.steps}
        self.notes += [note.text for note in news.notes]
        self.held_out |= dict(news.held_out)
        # As a browser does that loses its connection after each of the news.
        self.seen = Seen.parse(str(news.seen))
        return news

    @property
    def knows(self) -> object:
        return self.steps, self.notes, self.held_out


def test_viewers_that_come_early_and_late_know_the_same(run: GrowingRun) -> None:
    watched = WatchedRun(run.path)
    early, often = Viewer(watched), Viewer(WatchedRun(run.path))
    early.look()
    for steps in (3, 0, 4):
        run.train(steps)
        often.look()
    run.tell("checkpoint", step=5)
    early.look()
    run.resume(5)
    often.look()
    run.train(1, loss=1.0)
    run.tell("evaluated", step=6, held_out_loss=2.0)
    late = Viewer(WatchedRun(run.path))
    for viewer in (late, early, often):
        viewer.look()
        assert viewer.knows == late.knows
    assert late.steps == {**{step: 6.0 - 0.01 * step for step in range(5)}, 5: 1.0}
    assert late.held_out == {0: 6.0, 6: 2.0}
    assert late.notes == [
        "started",
        "checkpoint after 5 steps",
        "resumed from step-5",
        "held-out loss 2.0000 after 6 steps",
    ]


def test_a_viewer_of_replaced_files_begins_anew(run: GrowingRun) -> None:
    viewer = Viewer(WatchedRun(run.path))
    run.train(3)
    viewer.look()
    assert not viewer.look().anew
    (run.path / "metrics.jsonl").unlink()
    run.done = 0
    run.train(1, loss=9.0)
    news = viewer.look()
    assert news.anew
    assert viewer.steps == {0: 9.0}


@pytest.mark.parametrize("text", ["", "1.2", "a.b.c.d.e", "1.2.3.4.5.6", "..", "1.2.3.4.x"])
def test_an_id_that_is_none_has_seen_nothing(text: str) -> None:
    assert Seen.parse(text) == Seen()


def test_an_id_means_what_was_seen() -> None:
    assert Seen.parse(str(Seen(5, 6, 7, 8, 9))) == Seen(5, 6, 7, 8, 9)


def test_the_newest_step_is_shown_once_and_beside_its_prediction(run: GrowingRun) -> None:
    viewer = Viewer(WatchedRun(run.path))
    assert viewer.look().step is None
    run.train(4, late_rank=2)
    step = viewer.look().step
    assert step is not None
    assert step.step == 3
    assert set(step.measured.id.tolist()) == set(step.predicted.id.tolist())
    assert set(step.measured.step.tolist()) == {3}
    assert viewer.look().step is None
    run.train(1)
    assert viewer.look().step.step == 4


def test_a_step_that_one_rank_has_not_ended_is_not_shown(run: GrowingRun) -> None:
    run.train(3)
    viewer = Viewer(WatchedRun(run.path))
    run.train(1, but=3)
    assert viewer.look().step.step == 2
    run.train(1)
    assert viewer.look().step.step == 4


def test_the_late_rank_and_its_seconds_are_named(run: GrowingRun) -> None:
    """A rank with instructions of two milliseconds, where others take one, is late by one for each."""
    run.train(6, late_rank=2)
    step = StepsOfPlan(run.path).newest()
    rows = run.job.program.columns.rank
    alike = {rank: int((rows == rank).sum()) for rank in range(4)}
    late = {rank: 0.001 * alike[rank] for rank in range(4)} | {2: 0.002 * alike[2]}
    measured = dict.fromkeys(range(4), 0.0)
    predicted = dict.fromkeys(range(4), 0.0)
    for pair in step.comparison.ranks:
        measured[pair.rank] += pair.measured_s
        predicted[pair.rank] += pair.predicted_s
    for rank in range(4):
        # Messages and collectives begin when their other ends are ready, and so take less.
        assert 0 < measured[rank] <= late[rank] + 1e-9
    assert measured[2] > 1.5 * measured[3]
    assert late_ranks(step.comparison, 9) == pytest.approx(
        {rank: measured[rank] - predicted[rank] for rank in range(4)}
    )
    assert list(late_ranks(step.comparison, 1)) == [2]


def test_a_run_that_names_what_is_not_here_is_shown_without_instructions(run: GrowingRun) -> None:
    run.train(2)
    (run.path / "predicted.parquet").unlink()
    news = Viewer(WatchedRun(run.path)).look()
    assert news.step is None
    assert "predicted.parquet" in news.problem
    assert [one.step for one in news.steps] == [0, 1]


def test_the_figures_follow_from_the_newest_steps(run: GrowingRun) -> None:
    run.train(30)
    run.tell("checkpoint", step=30)
    news = Viewer(WatchedRun(run.path)).look()
    figures = {one.label: one for one in news.figures}
    assert list(figures) == [
        "step", "loss", "step time", "tokens per second", "MFU", "tensors of rank 0",
    ]  # fmt: skip
    assert figures["step"].value == "30/50"
    assert figures["step"].detail == "broken off, saved at 30"
    assert figures["loss"].detail == "held out 6.0000 after 0 steps"
    # The median of the last twenty, far above the prediction for a T4.
    assert figures["step time"].value == "120 ms"
    assert figures["step time"].tone == BAD
    assert news.interval_s[0] == run.job.prediction.step_s
    work = run.job.throughput_of(0.1195)
    assert figures["MFU"].value == f"{work.utilisation:.1%}"
