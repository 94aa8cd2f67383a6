"""Law: any plan of a job trains like one process; bitwise when the order of the sums is the same."""

from __future__ import annotations

import pytest
import torch
from pool import WorkerPool
from small_jobs import batch_of, make_plan, make_program, make_runtime, parameters_of, tiny, train_alone

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.program.verify import require_valid

pytestmark = pytest.mark.processes

STEPS = 2
SCHEDULES = ("gpipe", "1f1b", "breadth-first")


def train(
    rank: int, ranks: int, config: ModelConfig, plan: Plan
) -> tuple[list[float], dict[str, torch.Tensor]]:
    runtime = make_runtime(rank, config, plan, make_program(config, plan))
    losses = [runtime.step(step, batch_of(config, plan, step)).loss for step in range(STEPS)]
    parameters = parameters_of(runtime)
    assert all(not bucket.flat.any() for bucket in runtime.buckets.values())
    runtime.close()
    return losses, parameters


def alone(
    rank: int, ranks: int, config: ModelConfig, plan: Plan
) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train_alone(config, plan, STEPS)


def require_equal(pool: WorkerPool, config: ModelConfig, plan: Plan, *, bitwise: bool) -> None:
    require_valid(make_program(config, plan))
    # In a worker: the sums of one matrix product depend on the number of threads, and workers have one.
    [(expected_losses, expected)] = pool.run(alone, config, plan, ranks=1)
    seen: set[str] = set()
    for losses, parameters in pool.run(train, config, plan, ranks=plan.ranks):
        assert losses == (expected_losses if bitwise else pytest.approx(expected_losses, rel=1e-12))
        for name, value in parameters.items():
            if bitwise:
                assert torch.equal(value, expected[name]), name
            else:
                torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
        seen |= set(parameters)
    assert seen == set(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_pipelines_accumulate_the_same_bits(worker_pool: WorkerPool, schedule: str, pp: int) -> None:
    config = tiny()
    plan = make_plan(config, pp=pp, schedule=schedule, precision="fp32")
    require_equal(worker_pool, config, plan, bitwise=True)


@pytest.mark.parametrize(
    ("schedule", "pp", "loops", "micro_batches"),
    [
        ("breadth-first", 2, 2, 4),
        ("breadth-first", 2, 4, 3),
        ("breadth-first", 2, 3, 1),
        ("breadth-first", 3, 2, 2),
        ("depth-first", 2, 2, 4),
        ("depth-first", 2, 3, 2),
        ("depth-first", 3, 2, 3),
        ("hybrid", 2, 2, 4),
        ("zb-h1", 3, 1, 2),
        ("zb-h1", 4, 1, 4),
        ("zb-v", 1, 2, 3),
        ("zb-v", 3, 2, 4),
    ],
)
def test_looped_pipelines_accumulate_the_same_bits(
    worker_pool: WorkerPool, schedule: str, pp: int, loops: int, micro_batches: int
) -> None:
    config = tiny()
    plan = make_plan(
        config, pp=pp, loops=loops, schedule=schedule, micro_batches=micro_batches, precision="fp32"
    )
    require_equal(worker_pool, config, plan, bitwise=True)


def test_split_backwards_of_tied_embeddings_on_one_stage(worker_pool: WorkerPool) -> None:
    config = tiny(tied=True)
    require_equal(worker_pool, config, make_plan(config, schedule="zb-h1"), bitwise=False)


def test_looped_replicas_of_llama(worker_pool: WorkerPool) -> None:
    config = tiny("llama")
    plan = make_plan(config, pp=2, dp=2, loops=2, schedule="breadth-first")
    require_equal(worker_pool, config, plan, bitwise=False)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_fewer_micro_batches_than_devices(worker_pool: WorkerPool, schedule: str) -> None:
    config = tiny("llama")
    plan = make_plan(config, pp=4, schedule=schedule, micro_batches=2, precision="fp32")
    require_equal(worker_pool, config, plan, bitwise=True)


def test_tied_embeddings_on_one_stage(worker_pool: WorkerPool) -> None:
    config = tiny(tied=True)
    require_equal(worker_pool, config, make_plan(config, dp=2), bitwise=False)
