"""Trials of plans: who goes on, what a failure becomes, and one real training of ten steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from weft.cli.main import run as weft
from weft.describe.plan_file import load_plan
from weft.describe.run_file import run_of_keywords
from weft.errors import InputError, RunError, Violation
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Candidate
from weft.predict.ledger import Ledger
from weft.training import trials
from weft.training.trials import Trial, TrialOutcome, job_of_trial, measure_best, trial


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def planned() -> PlannedJob:
    """Eight plans, whatever this machine is: an expression in place of its devices."""
    run = run_of_keywords(
        model="gpt-1m", on="4xa100-80gb", global_batch=8, sequence=32, precision="fp32", pins={}
    )
    job = plan_run(run)
    here = run.model_copy(update={"cluster": run.cluster.model_copy(update={"use": "this-machine"})})
    return replace(job, run=here)


class Trainer:
    """Plans take as long as `steps_s` says, by their place in the ranking; None: they do not run."""

    def __init__(self, planned: PlannedJob, steps_s: list[float | None]) -> None:
        assert planned.ranking is not None
        self.steps_s = dict(zip((str(one.layout) for one in planned.ranking.fitting), steps_s, strict=False))
        self.asked: list[tuple[str, int]] = []

    def __call__(self, planned: PlannedJob, candidate: Candidate, steps: int) -> Trial:
        name = str(candidate.layout)
        self.asked.append((name, steps))
        step_s = self.steps_s[name]
        if step_s is None:
            return Trial(candidate=candidate, outcome=TrialOutcome.FAILED, steps=steps, reason="it fell over")
        seconds = (step_s, step_s * 1.1, step_s * 0.9)
        return Trial(candidate=candidate, outcome=TrialOutcome.MEASURED, steps=steps, seconds=seconds)


def test_few_plans_all_train_to_the_end_and_the_fastest_is_first(planned: PlannedJob) -> None:
    trainer = Trainer(planned, [0.4, 0.2, None, 0.3])
    found = measure_best(planned, 4, trainer)
    assert [one.step_s for one in found] == [0.2, 0.3, 0.4, None]
    assert {steps for _, steps in trainer.asked} == {trials.STEPS}
    assert found[0].spread == pytest.approx(0.1)
    assert found[-1].outcome is TrialOutcome.FAILED
    with Ledger() as ledger:
        assert ledger.honesty()["step_s"].scored == 3


def test_of_many_the_faster_half_goes_on(planned: PlannedJob) -> None:
    trainer = Trainer(planned, [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, None])
    found = measure_best(planned, 8, trainer)
    assert len(found) == 8
    assert [one.step_s for one in found] == [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, None]
    assert [one.steps for one in found] == [trials.STEPS] * 4 + [trials.SCREENING_STEPS] * 4
    assert len(trainer.asked) == 8 + 4
    with Ledger() as ledger:
        assert ledger.honesty()["step_s"].scored == 4


def test_plans_of_which_none_runs_are_a_failed_run(planned: PlannedJob) -> None:
    for count in (3, 6):
        with pytest.raises(RunError, match=rf"none of the {count} best plans ran; pp .*: it fell over"):
            measure_best(planned, count, Trainer(planned, [None] * 8))


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (
            RunError("rank 1: OutOfMemoryError: CUDA out of memory (log: /x/y.log)"),
            TrialOutcome.OUT_OF_MEMORY,
            "rank 1: OutOfMemoryError: CUDA out of memory",
        ),
        (RunError("rank 0 was killed (log: /x)"), TrialOutcome.FAILED, "rank 0 was killed"),
        (InputError(Violation("task.data", "is not there")), TrialOutcome.REFUSED, "task.data: is not there"),
    ],
)
def test_what_goes_wrong_is_a_result_and_leaves_no_files(
    planned: PlannedJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    outcome: TrialOutcome,
    reason: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(trials, "launch_workers", fail)
    assert planned.ranking is not None
    # A plan of A100 that says it is for this machine would be refused as another machine's.
    own = planned.run.model_copy(
        update={"cluster": planned.run.cluster.model_copy(update={"use": "4xa100-80gb"})}
    )
    found = trial(replace(planned, run=own), planned.ranking.fitting[0], 10)
    assert (found.outcome, found.reason, found.step_s, found.spread) == (outcome, reason, None, None)
    assert not list(tmp_path.glob("weft-trial-*"))


def test_a_trial_is_short_and_keeps_to_itself(planned: PlannedJob) -> None:
    assert planned.ranking is not None
    second = planned.ranking.fitting[1]
    job = job_of_trial(planned, second, 10)
    assert job.run.train.steps == 10
    assert job.run.report.log == ()
    assert job.plan == second.plan
    assert job.run.task == planned.run.task


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--on", "8xa100-80gb", "--measure", "2"],
            "weft: --measure: trains on this machine, and the plans are for 8xa100-80gb "
            "(nearest valid: --on this-machine)",
        ),
        (["--measure", "0"], "weft: --measure: 0 plans; at least one is trained (nearest valid: 1)"),
        (
            ["--measure", "2", "--compare", "amp"],
            "weft: --measure: not with --compare, which names several planners",
        ),
    ],
)
def test_a_mistake_is_a_clear_line(
    capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    assert weft(["plan", "gpt-1m", *options]) == 2
    assert expected in capsys.readouterr().err.splitlines()


@pytest.mark.processes
@pytest.mark.usefixtures("warm_starts")
def test_the_best_plan_trains_and_its_measurement_is_kept(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("Ten sheep graze on eleven hills. " * 200)
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npreset = "gpt-1m"\n[task]\ndata = "text.txt"\nsequence = 16\n'
        '[train]\nglobal_batch = 2\n[plan]\npp = 1\ndp = 1\nmicro_batch_size = 2\nschedule = "1f1b"\n'
    )
    out, page = tmp_path / "plan.json", tmp_path / "page.html"
    options = ["--measure", "1", "--json", "--out", str(out), "--report", str(page)]
    assert weft(["plan", str(path), *options]) == 0
    answer = json.loads(capfd.readouterr().out)
    (measured,) = answer["measured"]
    assert measured["outcome"] == "measured"
    assert measured["steps"] == 10
    assert len(measured["seconds"]) == 9
    assert min(measured["seconds"]) <= measured["measured_step_s"] <= max(measured["seconds"])
    assert answer["candidates"][0]["measured_step_s"] == measured["measured_step_s"]
    assert load_plan(out).plan_id == measured["plan_id"]
    assert "Measured on this machine" in page.read_text()
    assert "corrected by the other plans" in page.read_text()
    with Ledger() as ledger:
        assert ledger.honesty()["step_s"].scored == 1

    learned = answer["learned"]
    assert (learned["count"], learned["left_out"][0]["plan_id"]) == (1, measured["plan_id"])
    assert measured["corrected_step_s"] is None
    assert weft(["plan", str(path)]) == 0
    assert "corrected by 1 measurement" in " ".join(capfd.readouterr().out.split())
    Path(learned["file"]).unlink()
    assert weft(["plan", str(path)]) == 0
    assert "corrected" not in capfd.readouterr().out
