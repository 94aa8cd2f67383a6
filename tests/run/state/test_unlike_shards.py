"""A rank of a narrow replica holds the shards of the widest one, to the element."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_plans import divisible

from weft.describe.model import ModelConfig
from weft.run.parallel.tensor_stage import own_share
from weft.run.stage.build import build_stage
from weft.run.stage.stage_module import StageModule
from weft.run.state.bucket import FlatLayout, GradientBucket, make_buckets
from weft.run.state.unlike_shards import HeldShards

REPLICAS = 3


def share(config: ModelConfig, place: int, degree: int) -> tuple[StageModule, GradientBucket]:
    """A rank's share of a whole model and its gradient: that of a parameter tells all elements apart."""
    layers = range(config.layers + 2)
    module = build_stage(config, layers, 0, torch.float64, tensor_share=(place, degree))
    whole = build_stage(config, layers, 0, torch.float64)
    assert isinstance(module, StageModule)
    bucket = make_buckets({0: FlatLayout.of(module, REPLICAS)}, 1, torch.float64)[0]
    sizes = dict(whole.named_parameters())
    for number, (name, parameter) in enumerate(module.named_parameters()):
        elements = torch.arange(sizes[name].numel(), dtype=torch.float64) + 1 + 10_000 * number
        assert parameter.grad is not None
        parameter.grad.copy_(own_share(module, name, elements.view(sizes[name].shape)))
    return module, bucket


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_every_shard_is_the_flat_gradient_of_a_rank_of_the_widest_replica(family: str, degree: int) -> None:
    config = replace(divisible(family), heads=4, key_value_heads=4)
    for place in range(degree):
        module, bucket = share(config, place, degree)
        held = HeldShards(module, bucket, 4)
        before = bucket.flat.clone()
        seen: list[torch.Tensor] = []

        def add_up(flat: torch.Tensor, seen: list[torch.Tensor] = seen) -> None:
            seen.append(flat.clone())
            flat.mul_(REPLICAS)

        for shard in range(place * held.count, (place + 1) * held.count):
            held.reduce(shard, add_up)
            assert seen[-1].equal(share(config, shard, 4)[1].flat)
        # The sum of three equal replicas, of each element once.
        assert bucket.flat.equal(REPLICAS * before)


def test_a_rank_of_the_widest_replica_holds_its_own_shard() -> None:
    module, bucket = share(divisible("llama"), 1, 2)
    held, before = HeldShards(module, bucket, 2), bucket.flat.clone()
    assert held.count == 1
    held.reduce(1, lambda flat: None)
    assert bucket.flat.equal(before)
