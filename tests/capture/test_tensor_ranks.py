"""Layers that tensor ranks divide, measured by real processes: every row once, exchanges among them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from pool import WorkerPool
from predict.cost.machines import CPU as DEVICE
from small_plans import divisible

from weft.capture import layers
from weft.capture.layers import profile_layers
from weft.capture.subjects import IN_FLIGHT, one_of_each_kind, subjects_of, tensor_place
from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.predict.cost.compute import ComputeModel
from weft.predict.profile import LayerProfile
from weft.run.parallel.replica_ranks import ReplicaRanks

pytestmark = pytest.mark.processes

SIZES, DEGREES = (1, 2), (1, 2)
CPU = torch.device("cpu")
# Two ranks divide eight tokens, and not seven.
GPT, ODD = divisible("gpt"), divisible("gpt", sequence=7)


def profiled(rank: int, ranks: int, config: ModelConfig, throttled: bool) -> LayerProfile:
    layers.LOOKS, layers.ROUNDS_PER_LOOK, layers.THROTTLED_S = 1, 1, 0.0
    return profile_layers(
        config,
        layer_graph(config),
        "cpu",
        CPU,
        precision="fp32",
        micro_batch_sizes=SIZES,
        tensor_degrees=DEGREES,
        throttled=throttled,
    )


@pytest.mark.parametrize("throttled", [False, True])
@pytest.mark.parametrize("config", [GPT, divisible("llama"), ODD], ids=["gpt", "llama", "odd"])
def test_every_kind_size_and_degree_has_one_row(
    worker_pool: WorkerPool, config: ModelConfig, throttled: bool
) -> None:
    first, second = worker_pool.run(profiled, config, throttled, ranks=2)
    assert throttled or first == second
    kinds = {layer.kind for layer in layer_graph(config).layers}
    for profile in (first, second):
        rows = Counter((row.layer, row.micro_batch_size, row.tp) for row in profile.timings)
        assert rows == Counter((kind, size, degree) for kind in kinds for size in SIZES for degree in DEGREES)
        for row in profile.timings:
            assert min(row.forward_s, row.backward_s, row.update_s) > 0
    require_less_kept(first, config)


def require_less_kept(profile: LayerProfile, config: ModelConfig) -> None:
    """A tensor rank keeps no more of a layer than one rank alone does; which tokens have their row of the
    table here comes on top."""
    rows = {(row.layer, row.micro_batch_size, row.tp): row.activation_bytes for row in profile.timings}
    for (kind, size, degree), kept in rows.items():
        mask = size * config.sequence if kind == "embedding" and degree == 2 else 0
        assert kept <= rows[kind, size, 1] + mask


def exchanged(rank: int, ranks: int, config: ModelConfig) -> int:
    """How often the ranks meet in one round of the blocks."""
    graph, meetings = layer_graph(config), 0
    inside = ReplicaRanks.meeting

    def counted(self):
        nonlocal meetings
        meetings += 1
        return inside(self)

    blocks = one_of_each_kind(graph)[1]
    assert blocks == (1, 2)
    with (
        tensor_place(2) as tensor,
        subjects_of(config, graph, blocks, CPU, "fp32", (2,), tensor) as (blocks_of_two,),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(ReplicaRanks, "meeting", counted)
        blocks_of_two.round()
    return meetings


@pytest.mark.parametrize(("config", "per_pass"), [(GPT, 4), (ODD, 2)], ids=["sequence", "whole"])
def test_a_round_exchanges_what_a_step_does(
    worker_pool: WorkerPool, config: ModelConfig, per_pass: int
) -> None:
    """Twice a block in each pass, at entries and exits where the tokens are divided; then gradients of
    parameters that all have, once."""
    passes = 2 * IN_FLIGHT * 2
    once = 1 if per_pass == 4 else 0
    assert worker_pool.run(exchanged, config, ranks=2) == [passes * per_pass + once] * 2


def grouped(rank: int, ranks: int) -> tuple[int, int, float]:
    with tensor_place(2) as tensor:
        total = torch.tensor([float(rank)])
        torch.distributed.all_reduce(total, group=tensor.group)
        return tensor.place, tensor.size, total.item()


def test_neighbours_are_tensor_ranks_and_all_groups_run_at_once(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(grouped, ranks=4) == [(0, 2, 1.0), (1, 2, 1.0), (0, 2, 5.0), (1, 2, 5.0)]


def test_predicted_layers_are_the_measured_rows(worker_pool: WorkerPool) -> None:
    profile = worker_pool.run(profiled, GPT, False, ranks=2)[0]
    graph = layer_graph(GPT)
    for row in profile.timings:
        index = next(place for place, layer in enumerate(graph.layers) if layer.kind == row.layer)
        shape = Shape(row.micro_batch_size, GPT.sequence, row.tp)
        compute = ComputeModel(profile=profile)
        times = compute.stage_times(graph, (index,), shape, "fp32", DEVICE)
        assert times.forward_s == pytest.approx(row.forward_s)
        assert times.backward_input_s + times.backward_weight_s == pytest.approx(row.backward_s)
        assert compute.kept_bytes(graph, (index,), shape, "fp32", DEVICE) == row.activation_bytes
