"""Law: convolutional networks train like one process in any layout, statistics and dropout included."""

from __future__ import annotations

import pytest
import torch
from convolutional_jobs import images_of, loss_of, tiny, train_alone
from pool import WorkerPool
from run.test_recompute_equality import recomputing
from small_jobs import SEED, descent, make_plan, make_program

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.planning.compile import compile_evaluation_part
from weft.program.rank_program import part_of
from weft.program.verify import require_valid
from weft.run.precision import PRECISIONS
from weft.run.runtime import RankRuntime
from weft.run.stages import build_stage

pytestmark = pytest.mark.processes

STEPS = 3


def train(
    rank: int, ranks: int, config: ModelConfig, plan: Plan
) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Losses; parameters and statistics as everybody reads them; the loss of an evaluation at the end."""
    stages = {
        index: build_stage(config, stage.layers, SEED, PRECISIONS[plan.precision])
        for index, stage in enumerate(plan.stages)
        if any(rank in replica.ranks for replica in stage.replicas)
    }
    program = make_program(config, plan)
    require_valid(program)
    runtime = RankRuntime(plan, part_of(program, rank), stages, loss_of, descent, device="cpu", seed=SEED)
    evaluation = compile_evaluation_part(plan, layer_graph(config), rank)
    losses = []
    for step in range(STEPS):
        losses.append(runtime.step(step, images_of(config, plan, step)).loss)
        # Whoever reads in the middle changes nothing.
        evaluated = runtime.evaluate(evaluation, [images_of(config, plan, 100)])
    state = {name: value.clone() for module in stages.values() for name, value in module.state_dict().items()}
    runtime.close()
    return losses, state, evaluated


def alone(
    rank: int, ranks: int, config: ModelConfig, plan: Plan
) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train_alone(config, plan, STEPS)


def require_equal(pool: WorkerPool, config: ModelConfig, plan: Plan) -> None:
    [(expected_losses, expected)] = pool.run(alone, config, plan, ranks=1)
    answers = pool.run(train, config, plan, ranks=plan.ranks)
    seen: set[str] = set()
    for losses, state, evaluated in answers:
        assert losses == pytest.approx(expected_losses, rel=1e-10)
        assert evaluated == answers[0][2]
        for name, value in state.items():
            if name.endswith("num_batches_tracked"):
                assert value.item() == STEPS
                continue
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11)
            seen.add(name)
    assert seen == set(expected)


@pytest.mark.parametrize(
    ("schedule", "pp", "dp", "loops", "recompute"),
    [
        ("gpipe", 1, 1, 1, False),
        ("1f1b", 2, 2, 1, True),
        ("1f1b", 1, 3, 1, False),
        ("breadth-first", 2, 2, 2, False),
        ("zb-v", 2, 1, 2, True),
        ("chimera", 2, 1, 1, False),
    ],
)
def test_residual_networks(
    worker_pool: WorkerPool, schedule: str, pp: int, dp: int, loops: int, recompute: bool
) -> None:
    config = tiny("resnet")
    plan = make_plan(config, pp=pp, dp=dp, loops=loops, schedule=schedule)
    require_equal(worker_pool, config, recomputing(plan) if recompute else plan)


def test_narrowed_blocks(worker_pool: WorkerPool) -> None:
    config = tiny("resnet", bottleneck=True)
    require_equal(worker_pool, config, make_plan(config, pp=2, dp=2, schedule="1f1b"))


def test_replicas_weigh_as_much_as_they_have_micro_batches(worker_pool: WorkerPool) -> None:
    config = tiny("resnet")
    plan = make_plan(config, dp=2)
    (stage,) = plan.stages
    shares = (3, 5)
    replicas = tuple(
        one.model_copy(update={"micro_batches": share})
        for one, share in zip(stage.replicas, shares, strict=True)
    )
    uneven = plan.model_copy(update={"stages": (stage.model_copy(update={"replicas": replicas}),)})
    require_equal(worker_pool, config, uneven)


@pytest.mark.parametrize(
    ("family", "schedule", "pp", "dp", "loops", "recompute"),
    [
        ("vgg", "gpipe", 3, 1, 1, False),
        ("vgg", "1f1b", 2, 2, 1, True),
        ("alexnet", "breadth-first", 2, 1, 2, True),
    ],
)
def test_dropout_does_not_depend_on_the_cut(
    worker_pool: WorkerPool, family: str, schedule: str, pp: int, dp: int, loops: int, recompute: bool
) -> None:
    config = tiny(family)
    plan = make_plan(config, pp=pp, dp=dp, loops=loops, schedule=schedule)
    require_equal(worker_pool, config, recomputing(plan) if recompute else plan)


def test_sharded_replicas(worker_pool: WorkerPool) -> None:
    config = tiny("resnet")
    plan = make_plan(config, pp=2, dp=2, schedule="1f1b").model_copy(update={"sharding": "zero-2"})
    [(losses, _, _), *_] = worker_pool.run(train, config, plan, ranks=4)
    [(expected, _)] = worker_pool.run(alone, config, plan, ranks=1)
    assert losses == pytest.approx(expected, rel=1e-10)


def test_statistics_are_those_of_all_islands(worker_pool: WorkerPool) -> None:
    config = tiny("resnet")
    plan = make_plan(config, dp=4, micro_batches=2).model_copy(update={"sharding": "zero-1", "island": 2})
    [(expected_losses, expected)] = worker_pool.run(alone, config, plan, ranks=1)
    for losses, state, _ in worker_pool.run(train, config, plan, ranks=4):
        assert losses == pytest.approx(expected_losses, rel=1e-10)
        running = [name for name in state if "running" in name]
        assert running
        for name in running:
            torch.testing.assert_close(state[name], expected[name], rtol=1e-9, atol=1e-11)
