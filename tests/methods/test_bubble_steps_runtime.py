"""Evaluations and snapshots in bubbles, on devices in order and on late ones, beside those between steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from filled_plans import fills, placed
from late_streams import late
from pool import WorkerPool
from small_jobs import batch_of, loss_of, make_runtime
from small_plans import make_plan, make_program, tiny

from weft.describe.families import layer_graph
from weft.describe.plan import Plan
from weft.planning.compile import compile_evaluation
from weft.program.rank_program import part_of
from weft.run.methods import CopyBeside, EvaluationBeside
from weft.training.checkpoint.checkpoints import collect, room_for
from weft.training.tasks.base import Meter

GPT = tiny(layers=4)
STEPS, BEGIN = 7, 2


class Told(NamedTuple):
    """What a rank tells of the weights before step `BEGIN`, between steps and beside them."""

    between: float
    shares: list[float]
    metrics: tuple[Any, Any]
    saved: dict[str, torch.Tensor]
    copied: dict[str, torch.Tensor]


class Measuring:
    """A task with the largest output as its metric."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(outputs, targets)

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"largest": float(outputs.max())}


def evaluate(rank: int, ranks: int, plan: Plan, seed: int | None) -> tuple[Any, ...]:
    program = make_program(GPT, plan)
    device: AbstractContextManager[object] = nullcontext() if seed is None else late(seed)
    with device:
        meter = Meter(Measuring())  # type: ignore[arg-type]
        runtime = make_runtime(rank, GPT, plan, program, loss_fn=meter)
    batches = [batch_of(GPT, plan, 100 + number) for number in range(3)]
    states = runtime.methods
    evaluation, copies = states["evaluate"].evaluation, states["snapshot"].checkpoint_copies
    assert evaluation is not None
    assert copies is not None
    evaluation.prepare(batches, meter)
    assert evaluation.steps < STEPS - BEGIN
    told: dict[str, Any] = {}
    for step in range(STEPS):
        if step == BEGIN:
            told = begin(runtime, plan, meter, batches, evaluation, copies)
        runtime.step(step, batch_of(GPT, plan, step))
        if step == BEGIN:
            for end in copies.copied():
                end.wait()
    counted = meter.counted
    found = (
        told["between"],
        evaluation.take_shares(),
        (told["counted"], counted),
        told["saved"],
        told["room"],
    )
    runtime.close()
    return found


def begin(
    runtime: Any,
    plan: Plan,
    meter: Meter,
    batches: list[Any],
    evaluation: EvaluationBeside,
    copies: CopyBeside,
) -> dict[str, Any]:
    # Late passes of the step before would count, too.
    runtime.gather_weights()
    with meter.open():
        between = runtime.evaluate(part_of(compile_evaluation(plan, layer_graph(GPT)), runtime.rank), batches)
    counted = meter.counted
    meter.reset()
    evaluation.start(BEGIN)
    tensors = collect(runtime.stages, runtime.optimizers, runtime.stepped)
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    room = room_for(tensors, {})
    left = copies.take(tensors, room)
    # The tensors of a tiny model all change at steps only.
    assert not left
    return {"between": between, "counted": counted, "saved": saved, "room": room}


@pytest.mark.parametrize(("precision", "seed"), [("fp32", None), ("fp32", 1), ("bf16", 2)])
def test_work_of_steps_has_the_results_of_work_between_them(
    worker_pool: WorkerPool, precision: str, seed: int | None
) -> None:
    plan = make_plan(GPT, schedule="1f1b", pp=2, dp=2, micro_batches=4)
    methods = (fills(work="evaluate,snapshot", most_steps=16),)
    plan = placed(GPT, plan.model_copy(update={"methods": methods, "precision": precision}))
    told = [Told(*one) for one in worker_pool.run(evaluate, plan, seed, ranks=4)]
    losses = [sum(each) for each in zip(*(one.shares for one in told), strict=True)]
    for one in told:
        assert sum(losses) / len(losses) == one.between
        between, beside = one.metrics
        assert between == beside
        assert one.saved.keys() == one.copied.keys()
        assert all(torch.equal(tensor, one.copied[name]) for name, tensor in one.saved.items())
    assert any(one.metrics[0][1] for one in told)
