"""Laws: stages in segments train like whole ones, to the bit; a resumed run goes on.

Rows of the equality table hold them against one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asked_methods import CLIPS
from pool import WorkerPool
from saved_checkpoints import save_checkpoint
from small_jobs import SEED, make_runtime
from small_plans import divisible, make_program
from tensor_jobs import DividedLoss, samples_of
from tensor_plans import tensor_plan
from torch import nn

from weft.describe.model import ModelConfig
from weft.describe.plan import GRADIENT_NORM, Choice, Plan, Recompute
from weft.errors import InputError
from weft.methods.tensor_collectives.program import NAME, WAYS, crossed
from weft.program.rank_program import part_of
from weft.program.segments import segments_of
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.runtime import RankRuntime
from weft.run.stage.segments import StageRun
from weft.run.stage.tensor_pieces import TensorCut
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.training_state import TrainingState
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

STEPS = 2
ADAMW = OptimizerSettings(
    name="adamw", learning_rate=0.05, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.2
)
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def run_by(plan: Plan, way: str) -> Plan:
    return plan.model_copy(update={"methods": (*plan.methods, Choice(name=NAME, options={"run": way}))})


def _runtime(rank: int, config: ModelConfig, plan: Plan, generation: int, **options: Any) -> RankRuntime:
    clip_norm = 0.2 if plan.method(GRADIENT_NORM) else None
    program = make_program(config, plan)
    options = {"loss_fn": DividedLoss(), "generation": generation, "clip_norm": clip_norm, **options}
    return make_runtime(rank, config, plan, program, **options)


def train(rank: int, ranks: int, config: ModelConfig, plans: list[Plan]) -> list[Outcome]:
    """By plan, the losses and this rank's shares of the parameters."""
    outcomes = []
    for generation, plan in enumerate(plans):
        runtime = _runtime(rank, config, plan, generation)
        losses = [runtime.step(step, samples_of(config, plan, step)).loss for step in range(STEPS)]
        runtime.gather_weights()
        parameters = {
            f"{stage}.{name}": value.detach().clone()
            for stage, module in runtime.stages.items()
            for name, value in module.named_parameters()
        }
        outcomes.append((losses, parameters))
        runtime.close()
    return outcomes


def require_same(
    pool: WorkerPool,
    config: ModelConfig,
    plan: Plan,
    ways: tuple[str, ...] = WAYS,
    *,
    within: tuple[float, float] = (0.0, 0.0),
) -> None:
    """All ways give what `inside` gives, within so much, relative and absolute."""
    relative, absolute = within
    for inside, *others in pool.run(train, config, [run_by(plan, way) for way in ways], ranks=plan.ranks):
        for losses, parameters in others:
            assert losses == (pytest.approx(inside[0], rel=relative) if relative else inside[0])
            assert parameters.keys() == inside[1].keys()
            for name, value in parameters.items():
                torch.testing.assert_close(value, inside[1][name], rtol=relative, atol=absolute, msg=name)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "sequence"), [("gpt", 8), ("gpt", 7), ("llama", 8), ("bert", 7), ("vit", 8)]
)
def test_segments_train_like_whole_passes_to_the_bit(
    worker_pool: WorkerPool, family: str, sequence: int
) -> None:
    config = divisible(family, sequence=sequence)
    require_same(worker_pool, config, tensor_plan(config, schedule="1f1b"))


@pytest.mark.processes
@pytest.mark.parametrize(("family", "within"), [("gpt", (0.0, 0.0)), ("llama", (1e-6, 1e-7))])
def test_an_rms_norm_of_fp32_adds_up_gradients_in_another_order(
    worker_pool: WorkerPool, family: str, within: tuple[float, float]
) -> None:
    """Its input goes three ways, two of them into the norm; in fp64 a cast keeps these two together."""
    config = divisible(family)
    plan = tensor_plan(config, pp=2, schedule="1f1b", precision="fp32")
    require_same(worker_pool, config, plan, ("inside", "instructions"), within=within)


@pytest.mark.processes
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_segments_that_run_again_train_like_whole_passes_to_the_bit(
    worker_pool: WorkerPool, recompute: Recompute
) -> None:
    config = divisible("gpt")
    require_same(worker_pool, config, tensor_plan(config, schedule="1f1b", recompute=recompute))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "options", "sharding", "way"),
    [
        ("llama", {"pp": 2, "schedule": "1f1b"}, "zero-0", "overlapped"),
        ("gpt", {"dp": 2, "loops": 2, "schedule": "breadth-first"}, "zero-3", "interleaved"),
    ],
)
def test_segments_go_with_pipelines_and_shared_weights(
    worker_pool: WorkerPool, family: str, options: dict[str, Any], sharding: str, way: str
) -> None:
    config = divisible(family)
    plan = tensor_plan(config, **options).model_copy(update={"sharding": sharding, "methods": CLIPS})
    require_same(worker_pool, config, plan, ("inside", way))


@pytest.mark.processes
def test_a_tied_table_adds_up_its_gradient_in_another_order(worker_pool: WorkerPool) -> None:
    config = divisible("gpt", tied=True)
    require_same(worker_pool, config, tensor_plan(config), ("inside", "overlapped"), within=(1e-12, 1e-15))


def resume(rank: int, ranks: int, config: ModelConfig, plan: Plan, folder: Path) -> list[Outcome]:
    """Trained in one go, and stopped after a step and resumed."""
    state = TrainingState(
        step=1, plan_id=plan.plan_id, seed=SEED, samples=0, model="", precision="", data="", first_loss=0.0
    )
    outcomes = []
    for start, end in ((0, 3), (0, 1), (1, 3)):
        runtime = _runtime(rank, config, plan, len(outcomes), optimizer_factory=optimizer_factory(ADAMW))
        parts = runtime.stages, runtime.optimizers, runtime.stepped, runtime.methods
        if start:
            checkpoints.load(folder / "step-00000001", *parts, plan_ids={plan.plan_id})
        losses = [runtime.step(step, samples_of(config, plan, step)).loss for step in range(start, end)]
        runtime.gather_weights()
        if end == 1:
            save_checkpoint(folder, state, *parts, keep=1)
        parameters = {name: value.detach().clone() for name, value in runtime.stages[0].named_parameters()}
        outcomes.append((losses, parameters))
        runtime.close()
    return outcomes


@pytest.mark.processes
def test_a_resumed_run_goes_on_to_the_bit(worker_pool: WorkerPool, tmp_path: Path) -> None:
    config = divisible("gpt")
    plan = run_by(tensor_plan(config, precision="fp32"), "overlapped")
    for (losses, whole), (first, _), (second, resumed) in worker_pool.run(
        resume, config, plan, tmp_path, ranks=2
    ):
        assert first + second == losses
        assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


@pytest.mark.parametrize("enters", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("divides", [False, True])
def test_programs_have_collectives_where_ranks_exchange(enters: bool, backward: bool, divides: bool) -> None:
    ranks = TensorRanks(0, 2, divides_sequence=divides)
    found = crossed(enters, divides_sequence=divides, backward=backward)
    assert found == ranks.exchanges(enters=enters, backward=backward)


def test_a_stage_of_no_known_family_has_no_pieces() -> None:
    assert TensorCut.of(nn.Linear(2, 2)) is None


def test_a_stage_with_other_borders_than_the_program_is_refused() -> None:
    from weft.run.stage.build import build_stage

    config = divisible("gpt")
    program = part_of(make_program(config, run_by(tensor_plan(config), "instructions")), 0)
    owed = segments_of(program.obligations.methods)
    assert owed is not None
    shorter = build_stage(config, [0, 1], SEED, torch.float64, tensor_share=(0, 2))
    with pytest.raises(InputError, match="5 borders forward and 5 backward, the program 10 and 10"):
        StageRun(0, TensorCut(shorter), owed.segments[0])
