"""Law: a rank holds exactly as many stage-micro-batches at once as the program says."""

from __future__ import annotations

import weakref

import pytest
import torch
from pool import WorkerPool
from small_jobs import batch_of, make_runtime
from small_plans import make_plan, make_program, tiny
from torch import nn

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.timeline.figures import peak_in_flight

pytestmark = pytest.mark.processes

CASES = [
    ("gpipe", 2, 1, 4),
    ("1f1b", 2, 1, 4),
    ("1f1b", 4, 1, 6),
    ("breadth-first", 2, 2, 4),
    ("depth-first", 2, 2, 4),
    ("hybrid", 2, 2, 4),
    ("chimera", 4, 1, 4),
]


def most_held(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> int:
    """The most inputs of stages that were alive when a stage began, over two steps.

    What a forward leaves for its backward keeps the forward's input alive, and nothing else does.
    """
    runtime = make_runtime(rank, config, plan, make_program(config, plan))
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def begins(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal most
        alive[:] = [held for held in alive if held() is not None]
        alive.append(weakref.ref(inputs[0]))
        most = max(most, len(alive))

    for module in runtime.stages.values():
        module.register_forward_pre_hook(begins)
    for step in range(2):
        _ = runtime.step(step, batch_of(config, plan, step)).loss
    runtime.close()
    return most


@pytest.mark.parametrize(("schedule", "pp", "loops", "micro_batches"), CASES)
def test_micro_batches_in_flight_are_those_of_the_program(
    worker_pool: WorkerPool, schedule: str, pp: int, loops: int, micro_batches: int
) -> None:
    config = tiny()
    plan = make_plan(config, pp=pp, loops=loops, schedule=schedule, micro_batches=micro_batches)
    held = worker_pool.run(most_held, config, plan, ranks=plan.ranks)
    assert held == peak_in_flight(make_program(config, plan))
