"""Runs that log what they send of weights, whole and killed, and the weights of any of their steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hugging_face_jobs import model_folder, run_training, small, write_run, write_text
from pool import RankError, WorkerPool
from safetensors.torch import load_file
from stopped_runs import saved

from weft.describe.models import resolve_model
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanFile
from weft.describe.run_file import load_run
from weft.errors import InputError
from weft.run.stage.build import build_stages
from weft.run.state.bucket import FlatLayout
from weft.training.checkpoint.weight_log import WeightLog
from weft.training.checkpoint.weight_replay import replay
from weft.training.interchange.export import export

pytestmark = pytest.mark.processes

STEPS, KILLED = 6, 5


def new_run(home: Path, name: str, *, tied: bool = False, **checkpoint: object) -> tuple[Path, Plan]:
    """A run of two stages with two replicas each, that logs what they send of weights."""
    folder, text, run_dir = home / f"model-{tied}", home / "text.txt", home / name
    if not folder.exists():
        model_folder(folder, small("gpt", tied=tied))
        write_text(text)
    plan = write_run(run_dir, folder, text, precision="bf16", weights=False, pp=2, dp=2, micro_batches=4)
    few_bits = Choice(name="sdp4bit", options={"replicas_per_node": 1, "weight_group": 64})
    plan = plan.model_copy(update={"sync": few_bits, "sharding": "zero-1"})
    (run_dir / "plan.json").write_text(PlanFile(plan).to_json())
    run = load_run(run_dir / "run.toml")
    tables = {
        "checkpoint": run.checkpoint.model_copy(update={"weight_log": True, **checkpoint}),
        "train": run.train.model_copy(update={"steps": STEPS}),
    }
    (run_dir / "run.toml").write_text(run.model_copy(update=tables).to_toml())
    return run_dir, plan


def run_killed(rank: int, ranks: int, run_dir: Path, plan: Plan) -> int:
    """Rank 1 is killed when it has logged what it sent for a step."""
    kept = WeightLog.keep

    def last(log: WeightLog, step: int, stage: int, payload: torch.Tensor) -> None:
        kept(log, step, stage, payload)
        if (rank, step) == (1, KILLED):
            os.kill(os.getpid(), signal.SIGKILL)

    WeightLog.keep = last  # type: ignore[method-assign]
    try:
        return run_training(rank, ranks, run_dir, plan)
    finally:
        WeightLog.keep = kept  # type: ignore[method-assign]


def weights_of(run_dir: Path, plan: Plan, step: int) -> Mapping[str, torch.Tensor]:
    config = resolve_model(str(run_dir.parent / "model-False"))
    found = replay(run_dir, plan, config, step).folder
    names = [name for name in found.shapes if not name.startswith(("rank/", "optimizer/"))]
    return {name: found.read(name) for name in names}


@pytest.fixture(scope="module")
def whole(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A run that has saved every step."""
    run_dir, plan = new_run(tmp_path_factory.mktemp("logged"), "run", every=1, keep=STEPS)
    assert worker_pool.run(run_training, run_dir, plan, ranks=4) == [0] * 4
    return run_dir, plan


@pytest.fixture
def copied(whole: tuple[Path, Plan], tmp_path: Path) -> tuple[Path, Plan]:
    """The same with its first checkpoint alone, and all of its log."""
    shutil.copytree(whole[0].parent, tmp_path / "home")
    run_dir = tmp_path / "home" / "run"
    for step in range(2, STEPS + 1):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08d}")
    return run_dir, whole[1]


def test_one_checkpoint_and_the_log_give_the_weights_of_all_later_steps(
    whole: tuple[Path, Plan], copied: tuple[Path, Plan]
) -> None:
    config = resolve_model(str(whole[0].parent / "model-False"))
    for step in range(1, STEPS):
        # A checkpoint holds the weights with which its last step was computed.
        live, found = saved(whole[0], step), weights_of(*copied, step)
        for stage, of_plan in enumerate(whole[1].stages):
            ranks = [replica.ranks[0] for replica in of_plan.replicas]
            module = build_stages(whole[1], config, ranks[0], 0, torch.bfloat16)[stage]
            module.load_state_dict({name: found[name] for name in module.state_dict()})
            shown = [live[f"rank/{rank}/method/replicas/shown/{stage}"] for rank in ranks]
            assert torch.equal(FlatLayout.of(module, 2).flatten(torch.bfloat16), torch.cat(shown))


def test_a_killed_run_gives_the_weights_of_its_last_whole_step_and_logs_on_when_it_resumes(
    worker_pool: WorkerPool, whole: tuple[Path, Plan], tmp_path: Path
) -> None:
    run_dir, plan = new_run(tmp_path, "killed", every=2, keep=2)
    with pytest.raises(RankError):
        worker_pool.run(run_killed, run_dir, plan, ranks=4)
    expected, found = weights_of(*whole, KILLED - 1), weights_of(run_dir, plan, KILLED - 1)
    assert all(torch.equal(value, found[name]) for name, value in expected.items() if value.dim())
    exported = export(run_dir, tmp_path / "out", replay=KILLED - 1)
    assert exported.checkpoint.endswith(f"replayed to step {KILLED - 1}")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written
    assert all(torch.equal(value, found[name]) for name, value in written.items())
    assert worker_pool.run(run_training, run_dir, plan, ranks=4) == [0] * 4
    expected, found = weights_of(*whole, STEPS), weights_of(run_dir, plan, STEPS)
    assert all(torch.equal(value, found[name]) for name, value in expected.items() if value.dim())
    assert sorted(path.name for path in (run_dir / "weight_log").iterdir()) == [
        f"step-{step:08d}" for step in (4, 6)
    ]


def test_a_report_has_the_bytes_of_a_step_beside_those_of_a_checkpoint(whole: tuple[Path, Plan]) -> None:
    result = json.loads((whole[0] / "result.json").read_text())
    shown = [value for name, value in saved(whole[0]).items() if "/shown/" in name]
    # 4 bits and an fp32 scale for each 64 weights; shares are no whole groups.
    least = sum(4.5 / 8 * one.numel() for one in shown)
    assert least <= result["weight_log_step_bytes"] <= least + 4 * 8
    assert result["checkpoint_bytes"] > 10 * result["weight_log_step_bytes"]


@pytest.mark.parametrize(
    ("step", "remove", "problem"),
    [
        (0, "", r"checkpoints: no checkpoint before step 0 \(nearest valid: 1\)"),
        (STEPS + 1, "", rf"rank 0 has no whole record of step {STEPS + 1}, stage 0 .*: {STEPS}\)"),
        (4, "weight_log", r"no log since the checkpoint of step 1.*weight_log = true"),
        (4, "weight_log/step-00000001/rank-00003.log", r"rank 3 has no whole record of step 1, stage 1"),
        (4, "weight_log/step-00000003/rank-00001.log", r"rank 1 has no whole record of step 3, stage 1"),
        (4, "checkpoints/step-00000001", "no checkpoint yet"),
    ],
)
def test_missing_checkpoints_logs_and_records_are_named_in_one_line(
    copied: tuple[Path, Plan], step: int, remove: str, problem: str
) -> None:
    if (copied[0] / remove).is_file():
        (copied[0] / remove).unlink()
    elif remove:
        shutil.rmtree(copied[0] / remove)
    with pytest.raises(InputError, match=problem) as refused:
        weights_of(*copied, step)
    assert len(refused.value.violations) == 1


def test_all_logs_of_a_rank_missing_and_another_plan_are_refused(copied: tuple[Path, Plan]) -> None:
    run_dir, plan = copied
    for file in (run_dir / "weight_log").glob("*/rank-00003.log"):
        file.unlink()
    with pytest.raises(InputError, match="stage 1: 1 of 2 ranks' logs"):
        weights_of(run_dir, plan, 4)
    other = plan.model_copy(update={"schedule": Choice(name="gpipe")})
    with pytest.raises(InputError, match=f"saved by plan {plan.plan_id}; the run's log is of plan"):
        weights_of(run_dir, other, 4)
    with pytest.raises(InputError, match="replay: it begins with a checkpoint that it finds"):
        export(run_dir, run_dir / "out", replay=4, checkpoint=1)


def test_weights_that_stages_share_outside_their_gathers_are_refused(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    run_dir, plan = new_run(tmp_path, "tied", tied=True)
    with pytest.raises(RankError, match=r"stages change .* without the gathers that a log keeps"):
        worker_pool.run(run_training, run_dir, plan, ranks=4)
    dense = plan.model_copy(update={"sync": Choice(name="dense")})
    with pytest.raises(RankError, match=r"replicas send no payloads of few bits .* sync 'dense'"):
        worker_pool.run(run_training, run_dir, dense, ranks=4)
