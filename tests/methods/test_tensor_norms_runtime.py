"""Laws: sums count every element once, other plans go on from a checkpoint, mistaken plans are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equality_jobs import OPTIMIZERS
from equality_table import Row
from own_optimizers import Shortening
from pool import WorkerPool
from saved_checkpoints import save_checkpoint
from small_jobs import batch_of, make_runtime, parameters_of
from small_plans import make_program, tiny

from weft.describe.model import ModelConfig
from weft.describe.optimizers import ADAMW, LAMB, LANS, MOMENTUM_SGD, MUON, NVLAMB, OptimizerWork
from weft.describe.plan import Plan
from weft.errors import InputError, RunError
from weft.methods.tensor_norms.runtime import TensorTable
from weft.run.runtime import RankRuntime
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.checkpoints import TrainingState

pytestmark = pytest.mark.processes

STATE = TrainingState(
    step=2,
    plan_id="f00d",
    seed=3,
    samples=8,
    model="cafe",
    precision="fp64",
    data="beef",
    first_loss=5.5,
)


def runtime_of(rank: int, config: ModelConfig, plan: Plan, optimizer: str) -> RankRuntime:
    return make_runtime(
        rank, config, plan, make_program(config, plan), optimizer_factory=OPTIMIZERS[optimizer]
    )


def trained(runtime: RankRuntime, config: ModelConfig, plan: Plan, steps: range) -> dict[str, torch.Tensor]:
    for step in steps:
        runtime.step(step, batch_of(config, plan, step))
    runtime.gather_weights()
    found = parameters_of(runtime)
    runtime.close()
    return found


def save(rank: int, ranks: int, row: Row, plan: Plan, directory: Path) -> dict[str, torch.Tensor]:
    """Train two steps and save; the weights after two more."""
    runtime = runtime_of(rank, row.model, plan, row.optimizer)
    for step in range(2):
        runtime.step(step, batch_of(row.model, plan, step))
    save_checkpoint(directory, STATE, runtime.stages, runtime.optimizers, runtime.stepped, keep=1)
    return trained(runtime, row.model, plan, range(2, 4))


def go_on(rank: int, ranks: int, row: Row, plan: Plan, directory: Path) -> dict[str, torch.Tensor]:
    runtime = runtime_of(rank, row.model, plan, row.optimizer)
    path, _ = checkpoints.agree_on_newest(directory)
    assert path is not None
    checkpoints.load(path, runtime.stages, runtime.optimizers, runtime.stepped)
    return trained(runtime, row.model, plan, range(2, 4))


@pytest.mark.parametrize("optimizer", ["lamb", "lans", "muon"])
def test_another_plan_goes_on_from_the_checkpoint(
    worker_pool: WorkerPool, tmp_path: Path, optimizer: str
) -> None:
    shared = Row(tiny(tied=True), dp=2, micro_batches=2, sharding="zero-1", optimizer=optimizer)
    in_line = Row(tiny(tied=True), "1f1b", pp=2, optimizer=optimizer)
    [expected, _] = worker_pool.run(save, shared, shared.plan, tmp_path, ranks=2)
    for found in worker_pool.run(go_on, in_line, in_line.plan, tmp_path, ranks=2):
        for name, weight in found.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def refuse(rank: int, ranks: int, row: Row, plan: Plan) -> str:
    with pytest.raises(InputError) as refused:
        runtime_of(rank, row.model, plan, row.optimizer)
    return str(refused.value)


@pytest.mark.parametrize(
    ("optimizer", "counted", "problem"),
    [
        ("lamb", ADAMW, "Lamb adds up 2 numbers over whole tensors, the plan counts nothing"),
        ("lans", LAMB, "Lans adds up 1 + 3 numbers over whole tensors, the plan counts 2 numbers"),
        ("muon", MOMENTUM_SGD, "Muon orthogonalises 5 times, the plan counts 0"),
        ("adamw", MUON, "AdamW orthogonalises 0 times, the plan counts 5"),
        ("adamw", LANS, "AdamW adds up nothing over whole tensors, the plan counts 1 + 3 numbers"),
    ],
)
def test_a_plan_that_counts_other_sums_is_refused(
    worker_pool: WorkerPool, optimizer: str, counted: OptimizerWork, problem: str
) -> None:
    row = Row(tiny(layers=1), dp=2, micro_batches=2, optimizer=optimizer)
    plan = row.plan.model_copy(update={"optimizer": counted})
    lines = worker_pool.run(refuse, row, plan, ranks=2)
    assert lines == [f"plan: optimizer: {problem}; plan the run again"] * 2


def test_a_gradient_of_norm_1_needs_its_norm(worker_pool: WorkerPool) -> None:
    row = Row(tiny(layers=1), optimizer="nvlamb")
    [line] = worker_pool.run(refuse, row, row.plan.model_copy(update={"optimizer": NVLAMB}), ranks=1)
    needs = "NvLamb divides gradients by their norm, so the plan needs the method"
    assert line == f"plan: optimizer: {needs} (nearest valid: gradient-norm)"


class Together:
    """A group of ranks that all have the same tensors."""

    def __init__(self, size: int) -> None:
        self.size = size

    def add_up(self, flat: torch.Tensor) -> None:
        assert len(flat) % self.size == 0
        flat *= self.size


def test_sums_meet_by_parameter_and_count_once() -> None:
    table = TensorTable([3, 0, 2], [True, False, True], 4, torch.device("cpu"))
    sums = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    whole = table.whole(sums, Together(3))  # type: ignore[arg-type]
    assert whole.tolist() == [[3.0, 0.0, 9.0], [12.0, 0.0, 18.0]]


def test_a_step_with_more_sums_than_exchanges_is_refused() -> None:
    class Asking(Shortening):
        def parts(self):  # type: ignore[no-untyped-def]
            yield from super().parts()
            yield torch.zeros(1, 1)

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = Asking([parameter], 0.1)
    whole = optimizer.sums()
    with pytest.raises(RunError, match="Asking needs more sums in a step than its weft_work states"):
        optimizer.step(whole=whole)
