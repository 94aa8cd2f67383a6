"""The loop: it learns, resumes to the same bits after any stop, and says what it did."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import RankError, WorkerPool
from safetensors.torch import load_file
from small_jobs import make_plan, tiny

from weft.describe.catalogue import catalogue
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.families import layer_graph
from weft.describe.plan import Plan
from weft.describe.run_file import parse_run
from weft.moves.layout import Job
from weft.planning.planned import PlannedJob
from weft.planning.problem import Problem
from weft.run.recorder import collect_timeline
from weft.run.worker_start import WorkerContext
from weft.training.loop import train
from weft.training.tasks.base import TaskSettings
from weft.training.tasks.causal_lm import CausalLanguageModelling

pytestmark = pytest.mark.processes

CONFIG = replace(tiny(layers=2), vocabulary=256)
STEPS = 6


class SignalAt(CausalLanguageModelling):
    """Sends its process the signal of $TEST_SIGNAL, "RANK CALLS SIGNAL", at a call on a rank."""

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        rank, calls, number = (int(word) for word in os.environ["TEST_SIGNAL"].split())
        self._calls_left = calls if rank == dist.get_rank() else -1
        self._number = number

    def batch(self, samples: np.ndarray, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        if not held_out:
            self._calls_left -= 1
            if self._calls_left == 0:
                os.kill(os.getpid(), self._number)
        return super().batch(samples, held_out=held_out)


def job_of(
    plan: Plan, text: Path, steps: int, kind: str = "causal-lm", **changes: dict[str, object]
) -> PlannedJob:
    record = {
        "model": {"preset": "unused"},
        "task": {"kind": kind, "data": str(text)},
        "train": {"steps": steps, "seed": 5},
        "optimizer": {"learning_rate": 0.01, "warm_up_steps": 2},
        "checkpoint": {"every": 3, "keep": 2},
    }
    for table, keys in changes.items():
        record[table] = {**record[table], **keys}
    graph = layer_graph(CONFIG)
    group = NodeGroup(name="all", count=1, device=catalogue()["t4"].device, devices=4, link=Link(1e9, 1e-5))
    cluster = Cluster(name="test", groups=(group,))
    job = Job(graph=graph, cluster=cluster, global_batch=plan.global_batch, sequence=plan.sequence)
    return PlannedJob(run=parse_run(record), problem=Problem(job=job, model=CONFIG), plan=plan)


def run_training(
    rank: int, ranks: int, run_dir: Path, plan: Plan, steps: int, kind: str = "", changes: dict | None = None
) -> int:
    os.environ["WEFT_HOME"] = str(run_dir.parent / "home")
    kind = f"{__name__}:{kind}" if kind else "causal-lm"
    job = job_of(plan, run_dir.parent / "text.txt", steps, kind, **(changes or {}))
    return train(job, run_dir, WorkerContext(rank, ranks, rank, "cpu", 1))


def run_signalled(rank: int, ranks: int, run_dir: Path, plan: Plan, where: str) -> int:
    os.environ["TEST_SIGNAL"] = where
    return run_training(rank, ranks, run_dir, plan, STEPS, "SignalAt")


def new_run(tmp_path: Path, name: str = "run") -> Path:
    text = tmp_path / "text.txt"
    if not text.exists():
        words = np.random.default_rng(0).choice([b"warp ", b"weft ", b"loom\n"], 2000)
        text.write_bytes(b"".join(words.tolist()))
    (tmp_path / name).mkdir()
    return tmp_path / name


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(run_dir)}


def tensors(run_dir: Path, step: int = STEPS) -> dict[str, bytes]:
    files = sorted((run_dir / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    assert files
    return {name: value.numpy().tobytes() for file in files for name, value in load_file(file).items()}


def plan_of(**layout: int) -> Plan:
    return make_plan(
        CONFIG, **{"pp": 2, "micro_batches": 4, "schedule": "1f1b", "precision": "fp32", **layout}
    )


@pytest.fixture(scope="module")
def uninterrupted(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = new_run(tmp_path_factory.mktemp("uninterrupted"))
    assert worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2) == [0, 0]
    return run_dir


def beside(run_dir: Path, tmp_path: Path) -> Path:
    shutil.copy(run_dir.parent / "text.txt", tmp_path / "text.txt")
    return new_run(tmp_path)


def require_same(run_dir: Path, uninterrupted: Path) -> None:
    assert losses(run_dir) == losses(uninterrupted)
    assert tensors(run_dir) == tensors(uninterrupted)
    results = [json.loads((path / "result.json").read_text()) for path in (run_dir, uninterrupted)]
    for key in ("first_loss", "final_loss", "steps"):
        assert results[0][key] == results[1][key]


def test_the_files_of_a_run_say_what_happened(uninterrupted: Path) -> None:
    metrics = rows(uninterrupted)
    assert [row["step"] for row in metrics] == list(range(STEPS))
    for row in metrics:
        assert row["step_s"] > 0
        assert row["tokens_per_s"] == pytest.approx(8 * 8 / row["step_s"])
        assert row["max_rss_bytes"] > 10**7
        assert math.isfinite(row["loss"])
    assert [row["learning_rate"] for row in metrics] == [0.005, *[0.01] * 5]
    events = [(row["event"], row["step"]) for row in rows(uninterrupted, "events.jsonl")]
    assert events == [("started", 0), ("checkpoint", 3), ("checkpoint", 6), ("finished", 6)]
    result = json.loads((uninterrupted / "result.json").read_text())
    assert result["first_loss"] == pytest.approx(math.log(256), abs=0.1)
    assert result["steps"] == STEPS
    assert result["measured_step_s"] == metrics[-1]["step_s"]
    assert len(result["max_rss_bytes"]) == 2


def test_every_instruction_of_the_run_is_recorded(uninterrupted: Path) -> None:
    plan = plan_of()
    program = job_of(plan, uninterrupted.parent / "text.txt", STEPS).program
    timeline = collect_timeline(uninterrupted, program, plan.plan_id, "run")
    assert len(timeline) == STEPS * len(program)


def test_a_model_learns_what_the_text_is_made_of(worker_pool: WorkerPool, tmp_path: Path) -> None:
    run_dir = new_run(tmp_path)
    changes = {"optimizer": {"learning_rate": 0.03}, "checkpoint": {"every": 1000}}
    worker_pool.run(run_training, run_dir, plan_of(pp=1), 60, "", changes, ranks=1)
    result = json.loads((run_dir / "result.json").read_text())
    # Three equally likely words of five letters hold log(3) / 5 = 0.22 nats per byte, the letters alone 2.0.
    assert result["final_loss"] < 1.5


@pytest.mark.parametrize(
    "layout", [{"pp": 1, "dp": 2, "micro_batches": 2}, {"loops": 2, "schedule": "breadth-first"}]
)
def test_other_plans_of_the_job_learn_the_same(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path, layout: dict
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    worker_pool.run(run_training, run_dir, plan_of(**layout), STEPS, ranks=2)
    expected = losses(uninterrupted)
    assert losses(run_dir) == {step: pytest.approx(loss, abs=1e-4) for step, loss in expected.items()}


def test_three_steps_and_three_resumed_ones_are_six(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    worker_pool.run(run_training, run_dir, plan_of(), 3, ranks=2)
    worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2)
    require_same(run_dir, uninterrupted)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("calls", [3, 19])
def test_a_killed_rank_costs_nothing_but_time(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path, rank: int, calls: int
) -> None:
    """Call 3 is in step 0, before any checkpoint; call 19 in step 4, after the checkpoint of step 3."""
    run_dir = beside(uninterrupted, tmp_path)
    with pytest.raises(RankError):
        worker_pool.run(run_signalled, run_dir, plan_of(), f"{rank} {calls} {signal.SIGKILL:d}", ranks=2)
    assert not (run_dir / "result.json").exists()
    worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2)
    resumed = [row["step"] for row in rows(run_dir, "events.jsonl") if row["event"] == "resumed"]
    assert resumed == ([3] if calls == 19 else [])
    require_same(run_dir, uninterrupted)


@pytest.mark.parametrize("sharding", ["zero-1", "zero-2"])
def test_a_killed_run_that_shares_its_states_out_ends_like_one_that_shares_nothing(
    worker_pool: WorkerPool, tmp_path: Path, sharding: str
) -> None:
    plan = plan_of(pp=1, dp=2, loops=2, schedule="breadth-first", micro_batches=2)
    replicated, run_dir = new_run(tmp_path), new_run(tmp_path, "killed")
    worker_pool.run(run_training, replicated, plan, STEPS, ranks=2)
    shared = plan.model_copy(update={"sharding": sharding})
    with pytest.raises(RankError):
        worker_pool.run(run_signalled, run_dir, shared, f"1 19 {signal.SIGKILL:d}", ranks=2)
    worker_pool.run(run_training, run_dir, shared, STEPS, ranks=2)
    assert "resumed" in [row["event"] for row in rows(run_dir, "events.jsonl")]
    require_same(run_dir, replicated)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_finishes_its_step_saves_and_goes_on(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path, number: int, code: int
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    codes = worker_pool.run(run_signalled, run_dir, plan_of(), f"1 6 {number:d}", ranks=2)
    assert codes == [code, code]
    stopped = rows(run_dir, "events.jsonl")[-1]
    assert stopped["event"] == "stopped"
    assert list(losses(run_dir)) == list(range(stopped["step"]))
    assert stopped["step"] < STEPS
    worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2)
    require_same(run_dir, uninterrupted)


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2)
    newest = run_dir / "checkpoints" / f"step-{STEPS:08d}"
    (newest / "state.json").write_text("{}")
    worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2)
    skipped = [row for row in rows(run_dir, "events.jsonl") if row["event"] == "checkpoint skipped"]
    assert [newest.name in row["reason"] for row in skipped] == [True]
    require_same(run_dir, uninterrupted)


def test_a_finished_run_is_only_evaluated_again(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    for _ in range(2):
        worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2)
    assert len(rows(run_dir)) == STEPS
    require_same(run_dir, uninterrupted)


def test_another_seed_plan_or_text_is_refused_on_resume(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    worker_pool.run(run_training, run_dir, plan_of(), 3, ranks=2)
    (tmp_path / "text.txt").write_text("another text " * 100)
    with pytest.raises(RankError) as refused:
        worker_pool.run(
            run_training, run_dir, plan_of(micro_batches=2), STEPS, "", {"train": {"seed": 6}}, ranks=2
        )
    message = str(refused.value)
    assert "InputError" in message
    for name in ("plan", "seed 5, this run has 6", "data"):
        assert f"saved with {name}" in message
    assert len(rows(run_dir)) == 3


def test_refused_data_is_refused_by_every_rank(worker_pool: WorkerPool, tmp_path: Path) -> None:
    run_dir = new_run(tmp_path)
    (tmp_path / "text.txt").unlink()
    with pytest.raises(RankError, match=r"InputError: task\.data: .*does not exist"):
        worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2)
    assert not (run_dir / "checkpoints").exists()


def test_a_loss_that_is_not_finite_ends_the_run_and_spares_the_checkpoints(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    run_dir = new_run(tmp_path)
    changes = {"optimizer": {"learning_rate": 1e30}, "checkpoint": {"every": 5}}
    with pytest.raises(RankError, match="RunError: step 1: the loss is nan; try a lower"):
        worker_pool.run(run_training, run_dir, plan_of(), STEPS, "", changes, ranks=2)
    assert not (run_dir / "checkpoints").exists()
    assert list(losses(run_dir)) == [0]
