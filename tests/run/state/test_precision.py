"""A run of 16 bits steps fp32 masters: copies, messages and what is refused.

That it has the bits of one process: `tests/methods/rows/sharding.py`.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from asked_methods import CLIPS
from equality_table import Row, together, train
from pool import WorkerPool
from small_jobs import batch_of, make_runtime
from small_plans import make_plan, make_program, tiny

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import SCALED, Plan
from weft.planning.compile import compile_evaluation_part
from weft.predict.cost.memory import SHARDINGS
from weft.program.kinds import MESSAGES
from weft.run.streams import Completion, Stream, Value
from weft.run.transport.channels import Outbox
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

ADAMW = OptimizerSettings(
    name="adamw", learning_rate=0.01, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.2
)


@pytest.mark.processes
def test_copies_of_a_tied_weight_have_equal_masters(worker_pool: WorkerPool) -> None:
    row = Row(tiny(tied=True), "1f1b", pp=2, dp=2, precision="bf16", optimizer="adamw")
    rows = [replace(row, sharding=level) for level in SHARDINGS]
    # All copies of one plan are the same.
    first, *others = [together(worker_pool.run(train, one, one.plan, ranks=4)) for one in rows]
    assert first[1]["master of transformer.wte.weight"].dtype == torch.float32
    for told, tensors in others:
        assert told == first[0]
        assert all(torch.equal(tensors[name], value) for name, value in first[1].items())


def watch(
    rank: int, ranks: int, config: ModelConfig, plan: Plan
) -> tuple[list[int], list[int], float, list[float]]:
    """Bytes sent and announced, the loss of an evaluation, and those of steps on one batch."""
    program = make_program(config, plan)
    mine = program.columns.rank == rank
    sends = [kind for kind, _ in MESSAGES]
    announced = [
        int(size)
        for kind, size in zip(program.columns.kind[mine], program.columns.bytes[mine], strict=True)
        if kind in sends
    ]
    sent: list[int] = []
    send = Outbox.send

    def counted(outbox: Outbox, stream: Stream, label: str, value: Value[torch.Tensor]) -> Completion:
        sent.append(value.content.nbytes)
        return send(outbox, stream, label, value)

    batch = batch_of(config, plan, 0)
    runtime = make_runtime(rank, config, plan, program, optimizer_factory=optimizer_factory(ADAMW))
    with patch.object(Outbox, "send", counted):
        losses = [runtime.step(0, batch).loss]
    losses += [runtime.step(step, batch).loss for step in range(1, 25)]
    evaluated = runtime.evaluate(compile_evaluation_part(plan, layer_graph(config), rank), [batch])
    runtime.close()
    return sorted(sent), sorted(announced), evaluated, losses


@pytest.mark.processes
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_messages_have_the_predicted_bytes_and_the_loss_falls(
    worker_pool: WorkerPool, precision: str
) -> None:
    config = tiny()
    plan = make_plan(config, pp=2, dp=2, loops=2, schedule="breadth-first", precision=precision)
    plan = plan.model_copy(update={"sharding": "zero-3", "methods": CLIPS if precision in SCALED else ()})
    for sent, announced, evaluated, losses in worker_pool.run(watch, config, plan, ranks=4):
        assert sent == announced
        assert set(sent) == {2 * plan.micro_batch_size * config.sequence * config.hidden}
        assert losses[-1] < 0.8 * losses[0]
        assert evaluated < losses[-2]
