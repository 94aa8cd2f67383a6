"""Laws: what is offloaded comes back to the bit, leaves the device meanwhile, and is in every checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from late_accelerator import late_device
from late_streams import late
from pool import WorkerPool
from saved_checkpoints import save_checkpoint
from small_jobs import SEED, batch_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, tiny
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from weft.describe.plan import Choice, Plan
from weft.errors import RunError
from weft.methods.offload.kinds import STORE_ACTIVATIONS
from weft.methods.offload.runtime import MovedActivations, Offload, OffloadedStates, unpack
from weft.program.program import Program
from weft.run.runtime import RankRuntime
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.training_state import TrainingState
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

STEPS = 3
ADAMW = OptimizerSettings(
    name="adamw", learning_rate=0.05, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.2
)
CONFIG = tiny()
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def offloading(plan: Plan, **options: Any) -> Plan:
    return plan.model_copy(update={"methods": (Choice(name="offload", options=options),)})


def both(plan: Plan) -> Plan:
    return offloading(plan, states=True, activations=True)


def runtime_of(rank: int, plan: Plan, program: Program, **options: Any) -> RankRuntime:
    return make_runtime(rank, CONFIG, plan, program, optimizer_factory=optimizer_factory(ADAMW), **options)


def train(rank: int, ranks: int, plan: Plan, device: str, seed: int) -> tuple[Outcome, list[str]]:
    """Losses and weights of some steps on a device, and the edges of the program that nobody stated."""
    program, unstated = make_program(CONFIG, plan), list[str]()
    with _on(device, seed + rank) as clock:
        runtime = runtime_of(rank, plan, program)
        losses = [runtime.step(step, batch_of(CONFIG, plan, step)).loss for step in range(STEPS)]
        runtime.gather_weights()
        found = parameters_of(runtime)
        if clock is not None:
            unstated = clock.missing(program, rank, STEPS)
        runtime.close()
    return (losses, found), unstated


@contextmanager
def _on(device: str, seed: int) -> Iterator[Any]:
    with ExitStack() as entered:
        clock = entered.enter_context(late(seed)) if device == "late streams" else None
        if device in ("late device", "late kernels"):
            entered.enter_context(late_device(seed, kernels=True, exchanges=device == "late kernels"))
        yield clock


PLANS = {
    "gpipe": make_plan(CONFIG, pp=2, micro_batches=6, precision="fp32"),
    "looped": make_plan(CONFIG, pp=2, loops=3, schedule="breadth-first", precision="fp32"),
    "split": make_plan(CONFIG, pp=2, loops=2, schedule="zb-v", micro_batches=6, precision="bf16"),
    "shared": make_plan(CONFIG, pp=1, dp=2, loops=4, schedule="depth-first", precision="fp32").model_copy(
        update={"sharding": "zero-3"}
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", PLANS)
def test_late_copies_give_the_same_bits_and_every_wait_is_stated(worker_pool: WorkerPool, name: str) -> None:
    plan = PLANS[name]
    expected = [one for one, _ in worker_pool.run(train, plan, "host", 0, ranks=2)]
    devices = ["host", "late streams"]
    if name in ("gpipe", "looped"):
        devices += ["late device", "late kernels"]
    for device in devices:
        for (found, unstated), (losses, weights) in zip(
            worker_pool.run(train, both(plan), device, 11, ranks=2), expected, strict=True
        ):
            assert found[0] == losses
            assert all(torch.equal(value, weights[key]) for key, value in found[1].items()), device
            assert unstated == []


def watch(rank: int, ranks: int, plan: Plan) -> list[tuple[set[int], set[int]]]:
    """The addresses of optimizer states in each step, and after it."""
    during: list[set[int]] = []

    def watched(module: nn.Module) -> torch.optim.Optimizer:
        optimizer = optimizer_factory(ADAMW)(module)
        optimizer.register_step_post_hook(lambda *_: during.append(_addresses(optimizer)))
        return optimizer

    runtime = make_runtime(rank, CONFIG, plan, make_program(CONFIG, plan), optimizer_factory=watched)
    found = []
    for step in range(STEPS):
        during.clear()
        runtime.step(step, batch_of(CONFIG, plan, step))
        runtime.gather_weights()
        after = [_addresses(one) for one in runtime.optimizers.values()]
        found.append((set().union(*during), set().union(*after)))
    runtime.close()
    return found


def _addresses(optimizer: torch.optim.Optimizer) -> set[int]:
    states = (value for state in optimizer.state.values() for value in state.values())
    return {value.data_ptr() for value in states if value.ndim}


@pytest.mark.processes
def test_states_are_in_other_memory_between_steps(worker_pool: WorkerPool) -> None:
    plan = make_plan(CONFIG, pp=2, precision="fp32")
    for kept, moved in zip(
        worker_pool.run(watch, plan, ranks=2),
        worker_pool.run(watch, offloading(plan, states=True), ranks=2),
        strict=True,
    ):
        assert all(during == after for during, after in kept)
        assert all(during and not during & after for during, after in moved)
        # The memory of the host stays the same.
        assert len({frozenset(after) for _, after in moved}) == 1


def resume(rank: int, ranks: int, plans: tuple[Plan, Plan, Plan], folder: Path) -> list[Outcome]:
    """Trained in one go under the first plan; and a step under each plan, each from the checkpoint before."""
    outcomes = [_trained(rank, plans[0], folder / "whole", 0, STEPS, 0)]
    for step, plan in enumerate(plans):
        outcomes.append(_trained(rank, plan, folder, step, step + 1, step + 1))
    return outcomes


def _trained(rank: int, plan: Plan, folder: Path, start: int, end: int, generation: int) -> Outcome:
    runtime = runtime_of(rank, plan, make_program(CONFIG, plan), generation=generation)
    parts = runtime.stages, runtime.optimizers, runtime.stepped, runtime.methods
    if start:
        checkpoints.load(folder / f"step-{start:08}", *parts, plan_ids={plan.plan_id})
    losses = [runtime.step(step, batch_of(CONFIG, plan, step)).loss for step in range(start, end)]
    runtime.gather_weights()
    state = TrainingState(
        step=end, plan_id=plan.plan_id, seed=SEED, samples=0, model="", precision="", data="", first_loss=0.0
    )
    save_checkpoint(folder, state, *parts, keep=5)
    weights = parameters_of(runtime)
    runtime.close()
    return losses, weights


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sharding", "precision"), [("zero-0", "fp32"), ("zero-1", "bf16"), ("zero-3", "fp32")]
)
def test_a_checkpoint_has_states_of_the_host_and_goes_on_with_and_without_offload(
    worker_pool: WorkerPool, tmp_path: Path, sharding: str, precision: str
) -> None:
    plan = make_plan(CONFIG, dp=2, precision=precision).model_copy(update={"sharding": sharding})
    plans = both(plan), plan, both(plan)
    for whole, *parts in worker_pool.run(resume, plans, tmp_path, ranks=2):
        assert whole[0] == [loss for losses, _ in parts for loss in losses]
        assert all(torch.equal(value, whole[1][name]) for name, value in parts[-1][1].items())


def moved_bytes(rank: int, ranks: int, plan: Plan) -> list[tuple[int, int]]:
    """Of every micro-batch that leaves a stage, the bytes that move and those that are priced."""
    program, found = make_program(CONFIG, plan), []
    runtime = runtime_of(rank, plan, program)
    state = runtime.methods["offload"]
    assert isinstance(state, Offload)
    columns = program.columns
    stores = (columns.kind == STORE_ACTIVATIONS) & (columns.rank == rank)
    keys = zip(columns.stage[stores].tolist(), columns.micro_batch[stores].tolist(), strict=True)
    priced = dict(zip(keys, columns.bytes[stores].tolist(), strict=True))
    moved = state.moved

    def watched(stage: int, micro_batch: int) -> Any:
        storages = moved(stage, micro_batch)
        found.append((sum(one.bytes for one in storages), priced[stage, micro_batch]))
        return storages

    with patch.object(state, "moved", watched):
        runtime.step(0, batch_of(CONFIG, plan, 0))
    runtime.close()
    return found


@pytest.mark.processes
def test_a_micro_batch_moves_the_bytes_that_are_priced(worker_pool: WorkerPool) -> None:
    plan = offloading(make_plan(CONFIG, pp=2, micro_batches=6, precision="fp32"), activations=True)
    for found in worker_pool.run(moved_bytes, plan, ranks=2):
        assert len(found) > 6
        for moved, priced in found:
            assert moved == pytest.approx(priced, rel=0.1)


class Halves(nn.Module):
    """A product whose halves are views of one tensor, whose memory `gone` follows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.up(inputs)
        self._memory = hidden.untyped_storage()._weak_ref()
        one, other = hidden.chunk(2, dim=1)
        return (one * other).sum()

    @property
    def gone(self) -> bool:
        return torch.UntypedStorage._expired(self._memory)


def test_views_move_once_weights_and_inputs_stay_and_memory_is_given_back() -> None:
    module, inputs = Halves(), torch.randn(3, 4, requires_grad=True)
    leaves = (*module.parameters(), inputs)
    expected = torch.autograd.grad(module(inputs), leaves)
    moved = MovedActivations(leaves)
    with saved_tensors_hooks(moved.pack, unpack):
        output = module(inputs)
    moved.keep([output])
    [storage] = moved.storages
    assert storage.bytes == 3 * 8 * 4
    storage.store()
    assert not module.gone
    storage.release()
    assert module.gone
    with pytest.raises(RunError, match="activations that are in host memory"):
        output.backward(retain_graph=True)
    storage.take_room()
    storage.load()
    found = torch.autograd.grad(output, leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_states_from_a_checkpoint_leave_with_the_first_release() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(4)
    optimizer.step()
    restored = optimizer.state[weight]["exp_avg"]
    gone = weakref.ref(restored)
    states = OffloadedStates(optimizer)
    values = restored.clone()
    del restored
    states.release()
    assert gone() is None
    assert torch.equal(optimizer.state[weight]["exp_avg"], values)
    states.take_room()
    states.load()
    assert torch.equal(optimizer.state[weight]["exp_avg"], values)
