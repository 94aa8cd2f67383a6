"""The loop: it learns, resumes to the same bits after any stop, and says what it did."""

import json
import math
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from asked_methods import CLIPS
from pool import RankError, WorkerPool
from safetensors.torch import load_file
from small_plans import make_plan, tiny

from weft.describe.catalogue import catalogue
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.plan import Choice, Plan
from weft.describe.plan_versions import former_ids
from weft.describe.run_file import parse_run
from weft.errors import RunError
from weft.planning.compile import compile_plan
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import Problem
from weft.run.launch.worker_start import WorkerContext
from weft.run.record.recorder import collect_timeline
from weft.run.state.loss_scale import INITIAL
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.manifest import newest_complete
from weft.training.data.sampler import SampleLedger
from weft.training.directory.event_words import warnings
from weft.training.directory.run_directory import RunDirectory
from weft.training.loop import MOST_LEFT_OUT_STEPS, require_progress, train
from weft.training.optimizer.optimizers import settings_of
from weft.training.tasks.base import TaskSettings
from weft.training.tasks.text import CausalLanguageModelling

pytestmark = pytest.mark.processes

CONFIG = replace(tiny(layers=2), vocabulary=256)
STEPS = 6


class SignalAt(CausalLanguageModelling):
    """Sends its process the signal of $TEST_SIGNAL, "RANK CALLS SIGNAL PATH", at a call on a rank.

    It waits for the path first, so that a checkpoint that is being written is complete.
    """

    # It acts by rank, so every rank reads.
    mapped = True

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        *numbers, path = os.environ["TEST_SIGNAL"].split(maxsplit=3)
        rank, calls, self._number = (int(number) for number in numbers)
        self._calls_left = calls if rank == dist.get_rank() else -1
        self._path = Path(path)

    def batch(self, samples: np.ndarray, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        if not held_out:
            self._calls_left -= 1
            if self._calls_left == 0:
                while not self._path.exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), self._number)
        return super().batch(samples, held_out=held_out)


class Noted(CausalLanguageModelling):
    """Leaves the samples that are trained on in the file `read` beside the text, in their order."""

    def __init__(self, settings: TaskSettings) -> None:
        super().__init__(settings)
        self._read = Path(settings.data).with_name("read")

    def batch(self, samples: np.ndarray, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        if not held_out:
            with open(self._read, "a") as file:
                file.write("".join(f"{sample}\n" for sample in samples.tolist()))
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
        "run": {},
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


def run_signalled(
    rank: int,
    ranks: int,
    run_dir: Path,
    plan: Plan,
    where: str,
    checkpoint: str = "",
    changes: dict | None = None,
) -> int:
    os.environ["TEST_SIGNAL"] = f"{where} {run_dir / 'checkpoints' / checkpoint if checkpoint else run_dir}"
    return run_training(rank, ranks, run_dir, plan, STEPS, "SignalAt", changes)


def run_killed_inside(rank: int, ranks: int, run_dir: Path, plan: Plan, function: str, calls: int) -> int:
    """Rank 1 dies in that call of a function of `weft.training.checkpoint.checkpoints`."""
    left, called = calls, getattr(checkpoints, function)

    def last(*arguments: object, **named: object) -> object:
        nonlocal left
        left -= 1
        if left == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return called(*arguments, **named)

    setattr(checkpoints, function, last)
    try:
        return run_training(rank, ranks, run_dir, plan, STEPS)
    finally:
        setattr(checkpoints, function, called)


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
    assert events == [("started", 0), ("data", 0), ("checkpoint", 3), ("checkpoint", 6), ("finished", 6)]
    told = rows(uninterrupted, "events.jsonl")[1]
    assert told["tokens"] == 8 * told["samples"]
    assert told["epochs"] == metrics[-1]["epoch"] == pytest.approx(STEPS * 8 / told["samples"])
    assert (told["tokenizer"], told["first_sample"]) == ("bytes", 0)
    assert all(row["data_wait_s"] >= 0 for row in metrics)
    result = json.loads((uninterrupted / "result.json").read_text())
    assert result["first_loss"] == pytest.approx(math.log(256), abs=0.1)
    assert result["steps"] == STEPS
    assert result["measured_step_s"] == metrics[-1]["step_s"]
    assert len(result["max_rss_bytes"]) == 2
    saved = [row for row in rows(uninterrupted, "events.jsonl") if row["event"] == "checkpoint"]
    assert all(row["stall_s"] > 0 and row["write_s"] > 0 for row in saved)
    sizes = [file.stat().st_size for file in (uninterrupted / "checkpoints/step-00000006").iterdir()]
    assert 0 < sum(sizes) - saved[-1]["bytes"] < 4096, "all but the manifest"
    assert result["checkpoints"] == 2
    for name in ("stall_s", "write_s"):
        assert result[f"checkpoint_{name}"] == pytest.approx(sum(row[name] for row in saved))


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


def test_a_run_whose_replicas_reduce_in_bf16_is_resumed_to_the_bit(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    usual = plan_of(pp=1, dp=2, micro_batches=2)
    plan = usual.model_copy(update={"sharding": "zero-1", "reduce_precision": "bf16"})
    whole, halves, changed = (new_run(tmp_path, name) for name in ("whole", "halves", "changed"))
    worker_pool.run(run_training, whole, plan, STEPS, ranks=2)
    for steps in (3, STEPS):
        worker_pool.run(run_training, halves, plan, steps, ranks=2)
    require_same(halves, whole)
    # Another precision of reductions goes on from the same numbers, and then has others.
    worker_pool.run(run_training, changed, plan, 3, ranks=2)
    worker_pool.run(run_training, changed, usual, STEPS, ranks=2)
    assert tensors(changed, 3) == tensors(halves, 3)
    assert tensors(changed) != tensors(halves)


def test_a_run_in_fp16_goes_on_with_the_factor_of_its_losses(worker_pool: WorkerPool, tmp_path: Path) -> None:
    whole, halves = new_run(tmp_path, "whole"), new_run(tmp_path, "halves")
    plan = plan_of(precision="fp16").model_copy(update={"methods": CLIPS})
    worker_pool.run(run_training, whole, plan, STEPS, ranks=2)
    for steps in (3, STEPS):
        worker_pool.run(run_training, halves, plan, steps, ranks=2)
    expected = tensors(whole)
    assert tensors(halves) == expected
    factor, finite_steps = np.frombuffer(expected["method/gradient-norm/loss_scale"]).tolist()
    left_out = [row["step"] for row in rows(whole, "events.jsonl") if row["event"] == "left out"]
    assert factor == INITIAL / 2 ** len(left_out)
    assert finite_steps == STEPS - (left_out[-1] + 1 if left_out else 0)
    assert len(left_out) < STEPS


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("calls", [3, 19])
def test_a_killed_rank_costs_nothing_but_time(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path, rank: int, calls: int
) -> None:
    """Call 3 reads for step 0, before any checkpoint; call 19 for step 4, after the checkpoint of step 3."""
    run_dir = beside(uninterrupted, tmp_path)
    with pytest.raises(RankError):
        worker_pool.run(
            run_signalled,
            run_dir,
            plan_of(),
            f"{rank} {calls} {signal.SIGKILL:d}",
            "step-00000003" if calls == 19 else "",
            ranks=2,
        )
    assert not (run_dir / "result.json").exists()
    worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2)
    resumed = [row["step"] for row in rows(run_dir, "events.jsonl") if row["event"] == "resumed"]
    assert resumed == ([3] if calls == 19 else [])
    require_same(run_dir, uninterrupted)


@pytest.mark.parametrize(("sharding", "transport"), [("zero-1", "host"), ("zero-2", "device")])
def test_a_killed_run_that_shares_its_states_out_ends_like_one_that_shares_nothing(
    worker_pool: WorkerPool, tmp_path: Path, sharding: str, transport: str
) -> None:
    plan = plan_of(pp=1, dp=2, loops=2, schedule="breadth-first", micro_batches=2)
    replicated, run_dir = new_run(tmp_path), new_run(tmp_path, "killed")
    worker_pool.run(run_training, replicated, plan, STEPS, ranks=2)
    shared, changes = plan.model_copy(update={"sharding": sharding}), {"run": {"transport": transport}}
    where = f"1 9 {signal.SIGKILL:d}"  # a replica reads two micro-batches a step
    with pytest.raises(RankError):
        worker_pool.run(run_signalled, run_dir, shared, where, "step-00000003", changes, ranks=2)
    worker_pool.run(run_training, run_dir, shared, STEPS, "", changes, ranks=2)
    assert "resumed" in [row["event"] for row in rows(run_dir, "events.jsonl")]
    require_same(run_dir, replicated)


def test_a_rank_killed_inside_a_save_and_inside_a_load_costs_nothing_but_time(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    plan = plan_of(pp=1, dp=2, loops=2, schedule="breadth-first", micro_batches=2)
    replicated, run_dir = new_run(tmp_path), new_run(tmp_path, "killed")
    worker_pool.run(run_training, replicated, plan, STEPS, ranks=2)
    shared = plan.model_copy(update={"sharding": "zero-2"})
    # The second save is the last step's; a load comes before every save.
    for function, calls in (("digest_of", 2), ("read_tensors", 1)):
        with pytest.raises(RankError):
            worker_pool.run(run_killed_inside, run_dir, shared, function, calls, ranks=2)
        names = {path.name for path in (run_dir / "checkpoints").iterdir()}
        unfinished = {".saving-step-00000006"} if function == "digest_of" else set()
        assert names == {"step-00000003"} | unfinished, "what a killed save left is gone after the next start"
    worker_pool.run(run_training, run_dir, shared, STEPS, ranks=2)
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


def test_evaluations_on_the_way_change_nothing_and_are_told(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    changes = {"train": {"steps": STEPS, "seed": 5, "evaluate_every": 2}}
    assert worker_pool.run(run_training, run_dir, plan_of(), STEPS, "", changes, ranks=2) == [0, 0]
    require_same(run_dir, uninterrupted)
    told = {row["step"]: row["held_out_loss"] for row in RunDirectory(run_dir).held_out()}
    # The last step is evaluated at the end of the run, and once.
    assert [row["step"] for row in rows(run_dir, "events.jsonl") if row["event"] == "evaluated"] == [2, 4]
    assert list(told) == [0, 2, 4, STEPS]
    assert told[STEPS] < told[4] < told[2] < told[0]


def test_replicas_are_evaluated_when_they_have_agreed(worker_pool: WorkerPool, tmp_path: Path) -> None:
    run_dir = new_run(tmp_path)
    sync = {"sync": Choice(name="sign-momentum", options={"every": 3})}
    plan = plan_of(pp=1, dp=2, micro_batches=2).model_copy(update=sync)
    changes = {"train": {"steps": STEPS, "seed": 5, "evaluate_every": 2}}
    assert worker_pool.run(run_training, run_dir, plan, STEPS, "", changes, ranks=2) == [0, 0]
    # Of the steps 2 and 4, the first is evaluated when the round of three steps ends.
    assert [row["step"] for row in rows(run_dir, "events.jsonl") if row["event"] == "evaluated"] == [3]


def test_another_seed_or_text_is_refused_on_resume(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    worker_pool.run(run_training, run_dir, plan_of(), 3, ranks=2)
    (tmp_path / "text.txt").write_text("another text " * 100)
    with pytest.raises(RankError) as refused:
        worker_pool.run(run_training, run_dir, plan_of(), STEPS, "", {"train": {"seed": 6}}, ranks=2)
    message = str(refused.value)
    assert "InputError" in message
    for name in ("seed 5, this run has 6", "other data"):
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


def test_too_many_steps_left_out_in_a_row_end_the_run() -> None:
    require_progress(7, MOST_LEFT_OUT_STEPS - 1)
    with pytest.raises(RunError, match=r"step 7: the gradient of 10 steps in a row is not finite"):
        require_progress(7, MOST_LEFT_OUT_STEPS)


@pytest.mark.parametrize(
    ("ranks", "layout", "sharding"),
    [(1, {"pp": 1}, "zero-0"), (4, {"pp": 2, "dp": 2, "micro_batches": 2}, "zero-1")],
)
def test_a_run_goes_on_under_another_plan(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path, ranks: int, layout: dict, sharding: str
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    worker_pool.run(run_training, run_dir, plan_of(), 3, ranks=2)
    changed = plan_of(**layout).model_copy(update={"sharding": sharding})
    worker_pool.run(run_training, run_dir, changed, STEPS, ranks=ranks)
    (told,) = [row for row in rows(run_dir, "events.jsonl") if row["event"] == "plan changed"]
    assert (told["step"], told["former"], told["now"]) == (3, plan_of().plan_id, changed.plan_id)
    expected, found = losses(uninterrupted), losses(run_dir)
    assert found == {step: pytest.approx(loss, abs=1e-4) for step, loss in expected.items()}
    assert [found[step] for step in range(3)] == [expected[step] for step in range(3)]
    measured = json.loads((run_dir / "result.json").read_text())["measured_step_s"]
    assert measured == rows(run_dir)[-1]["step_s"], "of the steps of the plan that it has now"
    newest = json.loads((run_dir / "checkpoints/step-00000006/state.json").read_text())
    assert newest["plan_id"] == changed.plan_id


def test_replicas_that_step_by_themselves_begin_anew_from_their_average_under_another_plan(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    sync = {"sync": Choice(name="sign-momentum", options={"every": 2})}
    former = plan_of(pp=1, dp=2, micro_batches=2).model_copy(update=sync)
    changed = plan_of(pp=2, dp=2, micro_batches=2).model_copy(update=sync)
    worker_pool.run(run_training, run_dir, former, 3, ranks=2)
    worker_pool.run(run_training, run_dir, changed, STEPS, ranks=4)
    told = rows(run_dir, "events.jsonl")
    assert [(row["step"], row["former"]) for row in told if row["event"] == "began anew"] == [
        (3, former.plan_id)
    ]
    held_out = [row["held_out_loss"] for row in told if "held_out_loss" in row]
    assert held_out[-1] < held_out[0]
    assert [row["step"] for row in rows(run_dir)] == list(range(STEPS))


def test_steps_of_more_samples_than_the_data_has_are_told(worker_pool: WorkerPool, tmp_path: Path) -> None:
    run_dir = new_run(tmp_path)
    (tmp_path / "text.txt").write_text("short " * 6)
    worker_pool.run(run_training, run_dir, plan_of(pp=1), 1, ranks=1)
    told = rows(run_dir, "events.jsonl")
    (available,) = [row["samples"] for row in told if row["event"] == "data"]
    (warning,) = [row["warning"] for row in told if row["event"] == "data warning"]
    assert warning == f"a step of 8 samples repeats some, because the data has {available}"


@pytest.mark.parametrize(("steps", "told"), [(1, ["run warning"]), (2, [])])
def test_a_warm_up_that_the_run_does_not_end_is_told(
    worker_pool: WorkerPool, tmp_path: Path, steps: int, told: list[str]
) -> None:
    run_dir = new_run(tmp_path)
    worker_pool.run(run_training, run_dir, plan_of(pp=1), steps, ranks=1)
    events = rows(run_dir, "events.jsonl")
    assert [row["event"] for row in events if row["event"] == "run warning"] == told
    line = (
        "optimizer.warm_up_steps is 2, and the run has 1 step: the learning rate never reaches "
        "optimizer.learning_rate"
    )
    assert warnings(events, 0.0) == [line] * len(told)


def test_a_run_goes_on_with_another_global_batch_and_precision(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    decay = {"optimizer": {"schedule": "cosine", "decay_steps": 8}}
    former, changed = plan_of(pp=1), plan_of(pp=1, micro_batches=6, precision="bf16")
    worker_pool.run(run_training, run_dir, former, 3, "Noted", decay, ranks=1)
    worker_pool.run(run_training, run_dir, changed, STEPS, "Noted", decay, ranks=1)
    metrics, told = rows(run_dir), rows(run_dir, "events.jsonl")
    total = 3 * 8 + 3 * 12
    (available,) = {row["samples"] for row in told if row["event"] == "data"}
    assert [row["first_sample"] for row in told if row["event"] == "data"] == [0, 24]
    read = [int(number) for number in (run_dir.parent / "read").read_text().split()]
    assert read == SampleLedger(available, 5).take(0, total).tolist()
    assert [row["epoch"] * available for row in metrics] == pytest.approx([8, 16, 24, 36, 48, 60])
    # Steps count, of whatever size.
    settings = settings_of(job_of(former, run_dir, STEPS, **decay).run)
    assert [row["learning_rate"] for row in metrics] == [settings.rate(step) for step in range(STEPS)]
    newest = json.loads((run_dir / "checkpoints/step-00000006/state.json").read_text())
    assert (newest["samples"], newest["precision"]) == (total, "bf16")
    assert {len(tensors(run_dir, 3)[name]) - len(value) for name, value in tensors(run_dir).items()} == {0}


def test_a_precision_that_rounds_is_refused_on_resume(worker_pool: WorkerPool, tmp_path: Path) -> None:
    run_dir = new_run(tmp_path)
    worker_pool.run(run_training, run_dir, plan_of(pp=1, precision="fp64"), 1, ranks=1)
    with pytest.raises(RankError, match=r"InputError: .*saved with precision fp64, this run has bf16, which"):
        worker_pool.run(run_training, run_dir, plan_of(pp=1, precision="bf16"), 2, ranks=1)


@pytest.mark.parametrize("altered", [False, True])
def test_the_first_step_after_resuming_is_compared_with_what_was_recorded(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path, altered: bool
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    shutil.copytree(uninterrupted, run_dir, dirs_exist_ok=True)
    shutil.rmtree(run_dir / "checkpoints/step-00000006")
    metrics = rows(run_dir)
    if altered:
        metrics[3]["loss"] += 1e-6
    lines = [json.dumps(row) + "\n" for row in metrics]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2)
    told = [row for row in rows(run_dir, "events.jsonl") if row["event"] == "resume differs"]
    assert [(row["step"], row["recorded"]) for row in told] == ([(3, metrics[3]["loss"])] if altered else [])
    require_same(run_dir, uninterrupted)


def test_a_full_disk_costs_nothing_but_the_checkpoint_that_it_has_no_room_for(
    worker_pool: WorkerPool, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = beside(uninterrupted, tmp_path)
    disk = run_dir / "checkpoints"
    disk.mkdir()
    files = list((uninterrupted / "checkpoints/step-00000006").iterdir())
    room = int(1.5 * sum(file.stat().st_size for file in files)) // 4096 * 4096
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        with pytest.raises(RankError, match=r"RunError: .*No space left on device"):
            worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2)
        assert newest_complete(disk) == (disk / "step-00000003", [])
        subprocess.run(["mount", "-o", f"remount,size={4 * room}", str(disk)], check=True)
        worker_pool.run(run_training, run_dir, plan_of(), STEPS, ranks=2)
        assert sorted(path.name for path in disk.iterdir()) == ["step-00000003", "step-00000006"]
        require_same(run_dir, uninterrupted)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def run_as_version_1(rank: int, ranks: int, run_dir: Path, plan: Plan, steps: int) -> int:
    """Every file of the run has the id that version 1 of plans gave its plan."""
    (former,) = former_ids(plan)
    with patch.object(Plan, "plan_id", former):
        return run_training(rank, ranks, run_dir, plan, steps)


def test_a_run_that_an_earlier_version_began_goes_on_under_the_same_plan(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    run_dir, plan = new_run(tmp_path), plan_of(pp=1)
    worker_pool.run(run_as_version_1, run_dir, plan, 3, ranks=1)
    state = json.loads((run_dir / "checkpoints/step-00000003/state.json").read_text())
    assert {state["plan_id"]} == former_ids(plan)
    # Nothing is left to train, which another plan would be refused.
    worker_pool.run(run_training, run_dir, plan, 3, ranks=1)
    program = compile_plan(plan, layer_graph(CONFIG))
    measured = collect_timeline(run_dir, program, plan.plan_id, "run", former_ids=former_ids(plan))
    assert measured.plan_id == plan.plan_id
    with pytest.raises(RunError, match="recorded for plan"):
        collect_timeline(run_dir, program, plan.plan_id, "run")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "loss": 99.0, "time_s": time.time()}) + "\n")
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time_s": 0.0, "event": "resumed", "plan_id": state["plan_id"]}) + "\n")
    worker_pool.run(run_training, run_dir, plan, 4, ranks=1)
    told = [row["event"] for row in rows(run_dir, "events.jsonl")]
    assert "plan changed" not in told
    assert "resume differs" in told, "a loss that the same plan recorded is compared"
