"""Stages whose tokens context ranks divide: what they exchange, count, keep and refuse.

That they train like one process: `test_equality_table.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from divided_stages import evaluate_and_train, losses_of_three_steps, refusal_of_whole_stages
from equality_jobs import TokenLoss
from equality_table import Row
from pool import WorkerPool
from small_jobs import SEED, make_runtime
from small_plans import divisible, make_program, tiny
from tensor_jobs import samples_of

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.predict.cost.exchanges import LOSS_BYTES, gathered_bytes
from weft.predict.cost.memory import own_parameters, stage_kept_bytes
from weft.program.kinds import MESSAGES
from weft.run.launch.failures import PeerLostError
from weft.run.parallel.context.ranks import ContextRanks
from weft.run.stage.build import build_stage
from weft.run.streams import Completion, Stream, Value
from weft.run.transport.channels import Outbox
from weft.run.transport.host_group import HostGroup

pytestmark = pytest.mark.processes


def watch(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> dict[str, tuple[list[int], list[int]]]:
    """Bytes of a step's exchanges and what is announced of them, by what they carry."""
    program = make_program(config, plan)
    graph, mine = layer_graph(config), program.columns.rank == rank
    sends = [kind for kind, _ in MESSAGES]
    messages = [
        int(size)
        for kind, size in zip(program.columns.kind[mine], program.columns.bytes[mine], strict=True)
        if kind in sends
    ]
    [index] = [i for i, stage in enumerate(plan.stages) if any(rank in one.ranks for one in stage.replicas)]
    layers, shape = plan.stages[index].layers, plan.shape(index)
    exchanged = [gathered_bytes(graph, layer, shape, plan.element_bytes) for layer in layers]
    keys = plan.micro_batches * [size for size in exchanged if size]
    gathered = list(keys)
    if len(graph.layers) - 1 in layers:
        gathered += plan.micro_batches * [LOSS_BYTES * plan.cp]
    announced = {
        "messages": messages,
        "gather": gathered,
        "scatter_sum": keys,
        "add_up": [plan.element_bytes * own_parameters(graph, layers, shape)],
    }
    found: dict[str, list[int]] = {name: [] for name in announced}
    send, calls = (
        Outbox.send,
        {name: getattr(ContextRanks, name) for name in announced if name != "messages"},
    )

    def sent(outbox: Outbox, stream: Stream, label: str, value: Value[torch.Tensor]) -> Completion:
        found["messages"].append(value.content.nbytes)
        return send(outbox, stream, label, value)

    def counted(name: str, times: int) -> Any:
        def call(group: ContextRanks, value: torch.Tensor) -> torch.Tensor:
            found[name].append(times * value.nbytes)
            return calls[name](group, value)

        return call

    runtime = make_runtime(rank, config, plan, program, loss_fn=TokenLoss())
    with (
        patch.object(Outbox, "send", sent),
        patch.object(ContextRanks, "gather", counted("gather", plan.cp)),
        patch.object(ContextRanks, "scatter_sum", counted("scatter_sum", 1)),
        patch.object(ContextRanks, "add_up", counted("add_up", 1)),
    ):
        runtime.step(0, samples_of(config, plan, 0)).loss  # noqa: B018  (waits for the others)
    runtime.close()
    return {name: (sorted(found[name]), sorted(announced[name])) for name in announced}


@pytest.mark.parametrize(("family", "tp"), [("gpt", 1), ("llama", 1), ("gpt", 2)])
def test_exchanges_have_the_predicted_bytes(worker_pool: WorkerPool, family: str, tp: int) -> None:
    config = replace(divisible(family), vocabulary=20)
    plan = Row(config, "1f1b", pp=2, cp=2, tp=tp).plan
    for exchanges in worker_pool.run(watch, config, plan, ranks=plan.ranks):
        for found, announced in exchanges.values():
            assert found == announced
            assert found
        messages, _ = exchanges["messages"]
        assert set(messages) == {8 * plan.micro_batch_size * config.sequence // 2 // tp * config.hidden}


def test_an_evaluation_counts_the_loss_once(worker_pool: WorkerPool) -> None:
    config = divisible("gpt")
    for evaluated, trained in worker_pool.run(
        evaluate_and_train, config, Row(config, cp=2).plan, TokenLoss, ranks=2
    ):
        assert evaluated == trained


def test_bf16_trains_and_repeats_to_the_bit(worker_pool: WorkerPool) -> None:
    config = divisible("llama")
    plan = Row(config, cp=2, precision="bf16").plan
    first, again = (
        worker_pool.run(losses_of_three_steps, config, plan, TokenLoss, ranks=2) for _ in range(2)
    )
    assert first == again
    assert first[0] == first[1]
    assert first[0][2] < first[0][0]


def test_stages_must_compute_the_tokens_that_the_plan_gives(worker_pool: WorkerPool) -> None:
    config = divisible("gpt")
    assert worker_pool.run(refusal_of_whole_stages, config, Row(config, cp=2).plan, ranks=2) == [
        f"stage 0: rank {rank} was given context share 0 of 1, the plan gives it {rank} of 2"
        for rank in range(2)
    ]


def leave_early(rank: int, ranks: int) -> str:
    """The second rank never comes to the exchange."""
    # Before that, gloo would say that the ranks did not connect.
    dist.barrier()
    if rank == 1:
        return ""
    group = ContextRanks(rank, ranks)
    group.connect(HostGroup(dist.group.WORLD))
    with pytest.raises(PeerLostError) as caught:
        group.gather(torch.ones(3))
    return str(caught.value)


def test_a_rank_that_is_gone_is_named_as_such(worker_pool: WorkerPool) -> None:
    said, _ = worker_pool.run(leave_early, ranks=2)
    assert said.startswith("lost another context rank: ")


def kept_bytes(rank: int, ranks: int, config: ModelConfig) -> tuple[int, int]:
    """Bytes that blocks leave from their forward to their backward pass, and what is predicted."""
    stage = build_stage(config, range(1, 3), SEED, torch.float32, context_share=(rank, ranks))
    stage.context.connect(HostGroup(dist.group.WORLD))
    inputs = torch.randn(stage.input_shape(3, config.sequence), requires_grad=True)
    stage(inputs)
    # The first pass has made the mask of all blocks, which stays.
    masks = [part.context_attention._mask for part in stage.modules() if hasattr(part, "context_attention")]
    staying = [*stage.parameters(), *(mask for mask in masks if mask is not None)]
    others = {tensor.untyped_storage().data_ptr() for tensor in staying}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in others:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage(inputs)
    assert output.shape == stage.output_shape(3, config.sequence)
    shape = Shape(3, config.sequence, context_parallel=ranks)
    return sum(found.values()), stage_kept_bytes(layer_graph(config), range(1, 3), shape, "fp32")


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_blocks_keep_what_is_predicted(worker_pool: WorkerPool, family: str) -> None:
    config = replace(divisible(family, sequence=32), hidden=64, feed_forward=128)
    for kept, predicted in worker_pool.run(kept_bytes, config, ranks=2):
        assert kept == pytest.approx(predicted, rel=0.02)


def test_the_values_of_the_parameters_are_those_of_one_rank() -> None:
    config = divisible("bert")
    whole = build_stage(config, range(4), 3, torch.float32)
    own = build_stage(config, range(4), 3, torch.float32, context_share=(1, 2))
    expected = dict(whole.named_parameters())
    for name, value in own.named_parameters():
        assert torch.equal(value, expected.pop(name)), name
    assert not expected


def test_what_cannot_be_divided_is_refused() -> None:
    for config, shares, problem in (
        (tiny(), {"context_share": (0, 3)}, "cp 3: sequence 8 is not a multiple of 2 x cp = 6; "),
        (divisible("vit"), {"context_share": (0, 2)}, "cp 2: no ranks can divide the tokens of this model; "),
    ):
        with pytest.raises(InputError) as caught:
            build_stage(config, range(4), 0, torch.float32, **shares)
        assert str(caught.value).startswith(f"model {config.name}: {problem}")
