"""Law: a replica whose weights are not finite counts in no average, and goes on from that of the others."""

from __future__ import annotations

import pytest
import torch
from asked_methods import CLIPS
from equality_jobs import LOSSES
from equality_table import Row
from pool import WorkerPool
from small_jobs import batch_of, make_runtime
from small_plans import divisible, make_program, tiny
from torch import nn

from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.methods.local_averaging.options import LEFT_OUT
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

pytestmark = pytest.mark.processes

ADAMW = OptimizerSettings(name="adamw", learning_rate=0.01, weight_decay=0.1)
EVERY, STEPS = 2, 6


def broken_after(module: nn.Module, steps: int) -> torch.optim.Optimizer:
    """AdamW that ends so many steps with one element and its states not finite, and then goes on."""
    optimizer, done = optimizer_factory(ADAMW)(module), 0

    def spoil(*_: object) -> None:
        nonlocal done
        done += 1
        if done == steps:
            # One that tensor ranks divide.
            parameter = next(one for name, one in module.named_parameters() if "mlp" in name)
            with torch.no_grad():
                for tensor in (parameter, *optimizer.state[parameter].values()):
                    if tensor.ndim:
                        tensor.view(-1)[0] = torch.inf

    optimizer.register_step_post_hook(spoil)
    return optimizer


def train_broken(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, broken: int, after: int
) -> tuple[list[dict[str, float | tuple[int, ...]]], dict[str, torch.Tensor]]:
    steps = after if rank == broken else -1
    runtime = make_runtime(
        rank,
        config,
        plan,
        make_program(config, plan),
        loss_fn=LOSSES["columns"],
        clip_norm=0.5 if plan.methods else None,
        optimizer_factory=lambda module: broken_after(module, steps),
    )
    results = [runtime.step(step, batch_of(config, plan, step)) for step in range(STEPS)]
    told = [{"lost": result.lost_ranks, **result.totals} for result in results]
    states = {
        f"{stage} {number} {name}": state
        for stage, optimizer in runtime.optimizers.items()
        for number, states in enumerate(optimizer.state.values())
        for name, state in states.items()
    }
    parameters = {
        f"{stage} {name}": one.detach().clone()
        for stage, module in runtime.stages.items()
        for name, one in module.named_parameters()
    }
    assert all(one.isfinite().all() for one in (*states.values(), *parameters.values()))
    runtime.close()
    return told, parameters


def test_a_lost_replica_that_clips_leaves_its_step_out_and_ends_no_run(worker_pool: WorkerPool) -> None:
    config = tiny(layers=2)
    update = {"sync": Choice(name="slow-momentum", options={"every": EVERY}), "methods": CLIPS}
    plan = Row(config, "1f1b", pp=2, dp=2).plan.model_copy(update=update)
    outcomes = worker_pool.run(train_broken, config, plan, 3, 3, ranks=4)
    for told, _ in outcomes:
        # The first stage of this replica is finite: it has not stepped with the loss of the second.
        assert [step.get(LEFT_OUT) for step in told] == [None, 0.0, None, 1.0, None, 0.0]
        norms = torch.tensor([step["gradient_norm"] for step in told])
        assert norms.isfinite().tolist() == [True, True, True, False, True, True]
        assert all(norm > 0.5 for norm in norms[:3])


@pytest.mark.parametrize("method", ["diloco", "sign-momentum"])
def test_copies_of_a_weight_stay_equal_where_one_stage_of_a_replica_is_lost(
    worker_pool: WorkerPool, method: str
) -> None:
    config = tiny(layers=2, tied=True)
    plan = Row(config, "1f1b", pp=2, dp=2).plan
    plan = plan.model_copy(update={"sync": Choice(name=method, options={"every": EVERY})})
    found: dict[str, torch.Tensor] = {}
    holders = set()
    for told, parameters in worker_pool.run(train_broken, config, plan, 3, 4, ranks=4):
        holders |= {name.split()[0] for name in parameters if name.endswith("wte.weight")}
        assert told[3][LEFT_OUT] == 1.0
        for name, value in parameters.items():
            assert torch.equal(found.setdefault(name.split()[1], value), value), name
    assert holders == {"0", "1"}


@pytest.mark.parametrize(
    ("method", "tp", "after"),
    [("diloco", 1, 3), ("diloco", 1, 4), ("sign-momentum", 1, 4), ("local-averaging", 2, 4)],
)
def test_a_lost_replica_goes_on_from_the_average_of_the_others(
    worker_pool: WorkerPool, method: str, tp: int, after: int
) -> None:
    """If one tensor rank's part is not finite, none of its replica's ranks counts."""
    config = tiny(layers=2) if tp == 1 else divisible("llama")
    sync = Choice(name=method, options={"every": EVERY})
    plan = Row(config, dp=2, tp=tp).plan.model_copy(update={"sync": sync})
    outcomes = worker_pool.run(train_broken, config, plan, 2 * tp - 1, after, ranks=2 * tp)
    for told, _ in outcomes:
        assert [step.get(LEFT_OUT) for step in told] == [None, 0.0, None, float(tp), None, 0.0]
        # Weights that break after the first step of a round spoil the loss of the second.
        lost = (1,) if after == 3 else ()
        assert [step["lost"] for step in told] == [(), (), (), lost, (), ()]
    for lane in range(tp):
        one, other = outcomes[lane][1], outcomes[tp + lane][1]
        assert all(torch.equal(value, other[name]) for name, value in one.items())
