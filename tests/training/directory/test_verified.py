"""What a launcher leaves to its ranks, and ranks that find something else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pool import WorkerPool
from small_plans import make_plan
from training.test_loop import CONFIG, STEPS, job_of

from weft.describe.plan import Plan
from weft.errors import InputError
from weft.program.rank_program import digests
from weft.run.launch.worker_main import AGENT_PID
from weft.run.launch.worker_start import WorkerContext
from weft.training.directory.verified import NAME, verified_digests, write_verified
from weft.training.open_run import open_run

PLAN = make_plan(CONFIG, pp=2, dp=1, micro_batches=4, precision="fp32")


def written(tmp_path: Path) -> Path:
    """A run directory of which a launcher has verified the programs."""
    (tmp_path / "text.txt").write_text("the weft goes under and over the warp\n" * 100)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_verified(run_dir, job_of(PLAN, tmp_path / "text.txt", STEPS))
    return run_dir


def test_the_first_rank_reads_what_the_launcher_has_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, job = written(tmp_path), job_of(PLAN, tmp_path / "text.txt", STEPS)
    monkeypatch.setenv(AGENT_PID, "1")
    found = [one.tolist() for one in verified_digests(run_dir, job)]
    assert "program" not in vars(job)
    assert found == [digests(job.program).tolist(), digests(job.evaluation).tolist()]


def test_without_a_launcher_the_first_rank_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, job = written(tmp_path), job_of(PLAN, tmp_path / "text.txt", STEPS)
    (run_dir / NAME).write_text("of some other start")
    monkeypatch.delenv(AGENT_PID, raising=False)
    found = [one.tolist() for one in verified_digests(run_dir, job)]
    assert {"program", "evaluation"} <= vars(job).keys()
    assert found == [digests(job.program).tolist(), digests(job.evaluation).tolist()]


def test_what_was_verified_for_another_plan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = written(tmp_path)
    other = job_of(make_plan(CONFIG, pp=2, micro_batches=8), tmp_path / "text.txt", STEPS)
    monkeypatch.setenv(AGENT_PID, "1")
    with pytest.raises(InputError, match=f"is of plan {PLAN.plan_id}, and the ranks were started for"):
        verified_digests(run_dir, other)


def opened(rank: int, ranks: int, run_dir: Path, plan: Plan, *, launched: bool) -> tuple[str, bool, bool]:
    """What a rank says when it opens a run, whether it compiled the whole, and whether it opened any file."""
    os.environ["WEFT_HOME"] = str(run_dir.parent / "home")
    os.environ.pop(AGENT_PID, None)
    if launched:
        os.environ[AGENT_PID] = "1"
    job, said = job_of(plan, run_dir.parent / "text.txt", STEPS), ""
    try:
        run = open_run(job, run_dir, WorkerContext(rank, ranks, rank, "cpu", 1))
        run.close()
    except InputError as error:
        said = str(error)
    finally:
        os.environ.pop(AGENT_PID, None)
    return said, bool({"program", "evaluation"} & vars(job).keys()), (run_dir / "slots").exists()


def opened_by_torchrun(rank: int, ranks: int, run_dir: Path, plan: Plan) -> tuple[str, bool, bool]:
    return opened(rank, ranks, run_dir, plan, launched=False)


def opened_by_a_launcher(rank: int, ranks: int, run_dir: Path, plan: Plan) -> tuple[str, bool, bool]:
    return opened(rank, ranks, run_dir, plan, launched=True)


@pytest.mark.processes
def test_no_rank_compiles_the_whole_where_a_launcher_has(worker_pool: WorkerPool, tmp_path: Path) -> None:
    run_dir = written(tmp_path)
    assert worker_pool.run(opened_by_a_launcher, run_dir, PLAN, ranks=2) == [("", False, True)] * 2


@pytest.mark.processes
def test_the_first_rank_alone_compiles_the_whole_without_one(worker_pool: WorkerPool, tmp_path: Path) -> None:
    run_dir = written(tmp_path)
    found = worker_pool.run(opened_by_torchrun, run_dir, PLAN, ranks=2)
    assert found == [("", True, True), ("", False, True)]


@pytest.mark.processes
def test_a_rank_whose_part_was_not_verified_is_refused_before_anything_is_opened(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    run_dir = written(tmp_path)
    record = json.loads((run_dir / NAME).read_text())
    record["evaluation"][1] = f"{int(record['evaluation'][1], 16) ^ 1:016x}"
    (run_dir / NAME).write_text(json.dumps(record))
    for said, compiled, opened_any in worker_pool.run(opened_by_a_launcher, run_dir, PLAN, ranks=2):
        assert said.startswith("program: rank 1 has compiled another part of it than was verified")
        assert "\n" not in said
        assert not compiled
        assert not opened_any
