"""Replicas that divide tokens and layers: what they exchange, count, keep and refuse.

That they train like one process: `test_equality_table.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from divided_stages import evaluate_and_train
from equality_jobs import TokenLoss
from equality_table import Row
from pool import WorkerPool
from small_jobs import SEED, make_runtime
from small_plans import divisible, make_program
from tensor_jobs import samples_of

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.describe.replica_grid import ReplicaGrid
from weft.errors import InputError
from weft.planning.compile import compile_evaluation_part
from weft.predict.cost.memory import stage_kept_bytes
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.parallel.tensor_stage import connect_stages
from weft.run.stage.build import build_stage
from weft.run.transport.host_group import HostGroup

pytestmark = pytest.mark.processes


def exchanged_bytes(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> tuple[int, float]:
    """Bytes that tensor ranks exchange in the forward passes of a step, and what is predicted of them.

    An all-reduce is a gather and a sum that is scattered, each of all that it reduces.
    """
    runtime = make_runtime(rank, config, plan, make_program(config, plan), loss_fn=TokenLoss())
    found: list[int] = []

    def counted(name: str, times: int) -> Any:
        method = getattr(TensorRanks, name)

        def call(group: TensorRanks, value: torch.Tensor) -> torch.Tensor:
            found.append(times * value.nbytes)
            return method(group, value)

        return patch.object(TensorRanks, name, call)

    shape, graph = plan.shape(0), layer_graph(config)
    with counted("gather", shape.tensor_parallel), counted("scatter_sum", 1), counted("add_up", 2):
        runtime.evaluate(compile_evaluation_part(plan, graph, rank), [samples_of(config, plan, 0)])
    runtime.close()
    reduced = sum(layer.tensor_reduced(shape) for layer in graph.layers)
    return sum(found), 2 * plan.micro_batches * plan.element_bytes * reduced


def test_tensor_ranks_exchange_the_predicted_bytes_of_the_own_tokens(worker_pool: WorkerPool) -> None:
    config = divisible("gpt")
    for found, predicted in worker_pool.run(exchanged_bytes, config, Row(config, cp=2, tp=2).plan, ranks=4):
        assert found == predicted


def test_an_evaluation_counts_the_loss_once(worker_pool: WorkerPool) -> None:
    config = divisible("gpt")
    for evaluated, trained in worker_pool.run(
        evaluate_and_train, config, Row(config, cp=2, tp=2).plan, TokenLoss, ranks=4
    ):
        assert evaluated == trained


def kept_bytes(rank: int, ranks: int, config: ModelConfig) -> tuple[int, int]:
    """Bytes that blocks leave from their forward to their backward pass, and what is predicted."""
    grid = ReplicaGrid(2, 2)
    tensor, context, _ = grid.shares(rank)
    stage = build_stage(config, range(1, 3), SEED, torch.float32, tensor_share=tensor, context_share=context)
    for axis, along in zip(
        (stage.tensor, stage.context, stage.expert), grid.groups(range(ranks)), strict=True
    ):
        groups = {ranks: dist.new_group(ranks) for ranks in along}
        axis.connect(HostGroup(next(group for ranks, group in groups.items() if rank in ranks)))
    inputs = torch.randn(stage.input_shape(3, config.sequence), requires_grad=True)
    # The first pass has made the mask of all blocks, which stays.
    stage(inputs)
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
    shape = Shape(3, config.sequence, 2, 2)
    return sum(found.values()), stage_kept_bytes(layer_graph(config), range(1, 3), shape, "fp32")


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_blocks_keep_what_is_predicted(worker_pool: WorkerPool, family: str) -> None:
    config = replace(divisible(family, sequence=32), hidden=64, feed_forward=128)
    for kept, predicted in worker_pool.run(kept_bytes, config, ranks=4):
        assert kept == pytest.approx(predicted, rel=0.02)


def test_stages_must_be_divided_as_the_plan_says() -> None:
    config = divisible("gpt", sequence=16)
    plan = Row(config, cp=2, tp=2).plan
    stages = {0: build_stage(config, range(4), SEED, torch.float64, context_share=(1, 4))}
    with pytest.raises(InputError) as caught:
        connect_stages(plan, 1, stages, {})
    assert str(caught.value).splitlines() == [
        "stage 0: rank 1 was given tensor share 0 of 1, the plan gives it 1 of 2",
        "stage 0: rank 1 was given context share 1 of 4, the plan gives it 0 of 2",
    ]
