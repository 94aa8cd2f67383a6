"""`[plan] then`: a plan takes over at a step, to the bits of a run that is stopped and resumed under it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import RankError, WorkerPool
from pooled_runs import prepared
from training.directory.test_resuming import run_file
from training.test_loop import STEPS, job_of, losses, new_run, plan_of, rows, run_training, tensors

import weft
from weft.cli.main import run
from weft.cli.runs import Progress
from weft.describe.plan import Plan
from weft.describe.units import format_seconds
from weft.errors import InputError
from weft.planning.planned_job import Later
from weft.run.launch.worker_start import WorkerContext
from weft.training import loop
from weft.training.directory.run_directory import PLAN_FILES, RunDirectory
from weft.training.loop import train
from weft.training.session import reopen

pytestmark = pytest.mark.usefixtures("own_home")

AT_STEP = 2
BEFORE, AFTER = plan_of(), plan_of(pp=1, dp=2, micro_batches=2)


def run_turning(rank: int, ranks: int, run_dir: Path, before: Plan, after: Plan) -> int:
    job, later = (job_of(plan, run_dir.parent / "text.txt", STEPS) for plan in (before, after))
    return train(
        replace(job, later=Later(AT_STEP, later)), run_dir, WorkerContext(rank, ranks, rank, "cpu", 1)
    )


def turning(run_dir: Path) -> Path:
    """A run directory whose later plan has its files; their content is read by nobody here."""
    (run_dir / "then").mkdir()
    for name in PLAN_FILES:
        (run_dir / name).write_text("before")
        (run_dir / "then" / name).write_text("after")
    return run_dir


@pytest.mark.processes
def test_a_turn_gives_the_bits_of_a_stop_and_a_resume(worker_pool: WorkerPool, tmp_path: Path) -> None:
    turned, resumed = turning(new_run(tmp_path, "turned")), new_run(tmp_path, "resumed")
    assert worker_pool.run(run_turning, turned, BEFORE, AFTER, ranks=2) == [0, 0]
    for plan, steps in ((BEFORE, AT_STEP), (AFTER, STEPS)):
        assert worker_pool.run(run_training, resumed, plan, steps, ranks=2) == [0, 0]
    assert tensors(turned) == tensors(resumed)
    assert losses(turned) == losses(resumed)
    assert [(turned / name).read_text() for name in PLAN_FILES] == ["after"] * len(PLAN_FILES)
    assert not RunDirectory(turned).turns
    events = [(event["event"], event["step"]) for event in rows(turned, "events.jsonl")]
    assert ("plan changed", AT_STEP) in events
    assert [name for name, _ in events].count("finished") == 1
    assert json.loads((turned / "result.json").read_text())["steps"] == STEPS


# Far more than a plan of the test's model takes.
PEAK_BYTES = 300_000_000


def run_turning_at_a_peak(rank: int, ranks: int, run_dir: Path) -> int:
    turn = loop.turn

    def turn_at_a_peak(*arguments: Any) -> None:
        torch.ones(PEAK_BYTES // 4)
        turn(*arguments)

    with patch.object(loop, "turn", turn_at_a_peak):
        return run_turning(rank, ranks, run_dir, BEFORE, AFTER)


@pytest.mark.processes
def test_a_later_plan_has_a_memory_peak_of_its_own(worker_pool: WorkerPool, tmp_path: Path) -> None:
    run_dir = turning(new_run(tmp_path))
    assert worker_pool.run(run_turning_at_a_peak, run_dir, ranks=2) == [0, 0]
    peaks = [row["max_rss_bytes"] for row in rows(run_dir, "metrics.jsonl")]
    assert max(peaks[AT_STEP:]) < max(peaks[:AT_STEP]) + PEAK_BYTES / 2
    assert max(json.loads((run_dir / "result.json").read_text())["tensor_bytes"]) < PEAK_BYTES / 2


@pytest.mark.processes
def test_a_run_that_was_killed_between_two_plans_goes_on(worker_pool: WorkerPool, tmp_path: Path) -> None:
    run_dir = turning(new_run(tmp_path))
    assert worker_pool.run(run_training, run_dir, BEFORE, AT_STEP, ranks=2) == [0, 0]
    (run_dir / "then" / PLAN_FILES[-1]).replace(run_dir / PLAN_FILES[-1])
    assert worker_pool.run(run_turning, run_dir, BEFORE, AFTER, ranks=2) == [0, 0]
    assert sorted(losses(run_dir)) == list(range(STEPS))
    assert (run_dir / "plan.json").read_text() == "after"


def run_disagreeing(rank: int, ranks: int, run_dir: Path) -> int:
    return run_turning(rank, ranks, run_dir, BEFORE, AFTER if rank else BEFORE)


@pytest.mark.processes
def test_ranks_that_read_different_plans_do_not_turn(worker_pool: WorkerPool, tmp_path: Path) -> None:
    run_dir = turning(new_run(tmp_path))
    with pytest.raises(RankError, match="ranks would go on under different plans"):
        worker_pool.run(run_disagreeing, run_dir, ranks=2)
    assert (run_dir / "plan.json").read_text() == "before"


def source(tmp_path: Path, then: str = "at_step = 3, pp = 1, dp = 2") -> Path:
    plan = f"pp = 2\ndp = 1\nthen = {{ {then} }}"
    return run_file(tmp_path, "turning", plan=plan, train="global_batch = 8\nsteps = 6")


def test_both_plans_are_written_and_read_again(tmp_path: Path) -> None:
    planned, directory = prepared(source(tmp_path), directory=tmp_path / "run")
    assert [job.plan.mesh for job in planned.all] == [{"pp": 2, "dp": 1}, {"pp": 1, "dp": 2}]
    assert [job.last_step for job in planned.all] == [3, 6]
    again = reopen(directory.path)
    assert [job.plan for job in again.all] == [job.plan for job in planned.all]
    assert [job.run.train.steps for job in again.all] == [6, 6]
    directory.turn()
    turned = reopen(directory.path)
    assert turned.all == (turned,)
    assert turned.plan == planned.all[-1].plan


def test_progress_is_held_against_the_plan_that_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, directory = prepared(source(tmp_path), directory=tmp_path / "run")
    progress, row = Progress(quiet=False, unit="images"), {"loss": 1.0, "step_s": 1.0, "tokens_per_s": 1.0}
    for step, job in enumerate(planned.all):
        with (directory.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time_s": time.time(), **row}) + "\n")
        progress.update(directory)
        progress.finish()
        told = capsys.readouterr().out
        assert f"predicted {format_seconds(job.prediction.step_s)} |" in told
        assert " images/s  " in told
        if directory.turns:
            directory.turn()


def test_a_run_without_a_later_plan_loses_that_of_a_former_start(tmp_path: Path) -> None:
    _, directory = prepared(source(tmp_path), directory=tmp_path / "run")
    prepared(run_file(tmp_path, "plain"), directory=directory.path)
    assert not directory.then.exists()


@pytest.mark.parametrize(
    ("then", "problem"),
    [
        ("at_step = 6, pp = 1, dp = 2", "plan.then.at_step: 6; the run ends with step 6, before"),
        ("at_step = 3, pp = 1, dp = 1", "plan.then: its plan uses 1 rank, and a run keeps the 2"),
        ("pp = 1", "plan.then.at_step"),
        ("at_step = 0", "plan.then.at_step"),
        ("at_step = 2, pp = 1, dp = 3", "plan.then: plan: no layout of all 2 devices"),
        ("at_step = 2, ppp = 1", "ppp"),
    ],
)
def test_a_plan_that_cannot_take_over_is_refused(tmp_path: Path, then: str, problem: str) -> None:
    with pytest.raises(InputError) as refused:
        prepared(source(tmp_path, then), directory=tmp_path / "run")
    assert any(problem in str(one) for one in refused.value.violations), refused.value.violations
    assert not (tmp_path / "run" / "plan.json").exists()


def test_fewer_steps_than_the_turn_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"plan.then.at_step: 3; the run ends with step 2"):
        prepared(source(tmp_path), steps=2, directory=tmp_path / "run")


def test_both_plans_together_keep_the_deadline(tmp_path: Path) -> None:
    path = source(tmp_path)
    step_s = [job.prediction.step_s for job in weft.plan(path).job.all]
    text = path.read_text()
    for hours, kept in ((sum(step_s) * 3.01 / 3600, True), (sum(step_s) * 2.99 / 3600, False)):
        path.write_text(f"{text}[goal]\ndeadline_hours = {hours!r}\n")
        if kept:
            assert len(weft.plan(path).job.all) == 2
            continue
        with pytest.raises(InputError, match=r"6 steps of the best plan \(pp 2 .*, then pp 1 .*\) take"):
            weft.plan(path)


def test_a_later_plan_keeps_the_contract_of_the_goal(tmp_path: Path, weft_example: Path) -> None:
    with pytest.raises(InputError, match=r"'exact' keeps out plan\.schedule 'in-twos', which is unbiased"):
        weft.plan(source(tmp_path, 'at_step = 3, pp = 2, dp = 1, schedule = "in-twos"'))


def test_both_plans_are_searched_on_as_many_ranks_as_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = source(tmp_path, "at_step = 3, pp = 1")
    path.write_text(path.read_text().replace("dp = 1\n", ""))
    assert run(["simulate", str(path), "--ranks", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["peak_bytes"]) == 4


def test_plan_tells_the_plan_that_takes_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(source(tmp_path))]) == 0
    assert "from step 3 on: pp 1 x dp 2" in capsys.readouterr().out
    assert run(["plan", str(source(tmp_path)), "--json"]) == 0
    then = json.loads(capsys.readouterr().out)["then"]
    assert (then["at_step"], then["layout"].split(",")[0]) == (3, "pp 1 x dp 2")
    assert then["step_s"] == weft.plan(source(tmp_path)).job.all[-1].prediction.step_s


@pytest.mark.processes
@pytest.mark.usefixtures("warm_starts")
def test_a_whole_run_turns_and_is_compared_with_its_last_plan(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("warp weft loom " * 2000)
    path = source(tmp_path)
    path.write_text(path.read_text().replace("2xv100-32gb", "this-machine"))
    finished = weft.train(path, data=str(text), directory=tmp_path / "run")
    assert finished.compare().step.measured_s > 0
    assert finished.summary["plan_id"] == RunDirectory(tmp_path / "run").plan().plan_id
    assert RunDirectory(tmp_path / "run").plan().mesh == {"pp": 1, "dp": 2}
    assert [row["step"] for row in RunDirectory(tmp_path / "run").metrics()] == list(range(6))
    assert not RunDirectory(tmp_path / "run").then.exists()
