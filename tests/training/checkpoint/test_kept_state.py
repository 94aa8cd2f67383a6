"""Law: a rank that goes back to a kept state goes on to the same bits, in another runtime."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import WorkerPool
from small_jobs import LEARNING_RATE, batch_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, tiny
from torch import nn

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.predict.cost.memory import stage_parameters
from weft.training.checkpoint.kept_state import KeptState
from weft.training.checkpoint.training_state import TrainingState

pytestmark = pytest.mark.processes

STATE = TrainingState(step=3, samples=0, plan_id="", seed=0, model="", precision="", data="", first_loss=0.0)
CSER = {"update_ratio": 8.0, "reset_ratio": 2.0, "every": 3, "keep_errors": True}


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.1 * LEARNING_RATE)


def go_back(
    rank: int, ranks: int, config: ModelConfig, plan: Plan
) -> tuple[int, list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The bytes of a state; losses of two steps and weights after them, straight on and from that state."""

    def trained(runtime: Any, steps: range) -> list[float]:
        return [runtime.step(step, batch_of(config, plan, step)).loss for step in steps]

    program = make_program(config, plan)
    runtime = make_runtime(rank, config, plan, program, optimizer_factory=adam)
    trained(runtime, range(3))
    kept = KeptState.of(runtime, STATE)
    tensors = [*kept.weights.values(), *kept.methods.values()]
    for one in kept.optimizers.values():
        tensors += [each for state in one["state"].values() for each in state.values() if each.dim()]
    held_bytes = sum(one.nbytes for one in tensors)
    through, after = trained(runtime, range(3, 5)), parameters_of(runtime)
    runtime.close()
    other = make_runtime(rank, config, plan, program, optimizer_factory=adam, generation=1)
    trained(other, range(2))
    for _ in range(2):
        # The steps between must leave the kept state as it is.
        kept.restore(other)
        again, found = trained(other, range(3, 5)), parameters_of(other)
    other.close()
    return held_bytes, through, again, after, found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_goes_on_from_a_kept_state_to_the_same_bits(worker_pool: WorkerPool, precision: str) -> None:
    config = tiny(layers=2, tied=True)
    plan = make_plan(config, dp=2, precision=precision)
    plan = plan.model_copy(update={"sync": Choice(name="cser", options=CSER)})
    # In fp32, the weights, their errors and two momenta.
    counted = 4 * 4 * stage_parameters(layer_graph(config), plan.stages[0].layers, plan.shape(0))
    for held_bytes, through, again, after, found in worker_pool.run(go_back, config, plan, ranks=2):
        # Indices of resets come on top.
        assert counted <= held_bytes <= 1.01 * counted
        assert again == through
        assert all(torch.equal(value, found[name]) for name, value in after.items())
