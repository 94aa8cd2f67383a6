"""`make_states`: weights, gradients and masters of a rank's stages, by precision and level of sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.program.buffers import SHARDED_BUFFERS
from weft.run.state.bucket import FlatLayout, GradientBucket, make_buckets
from weft.run.state.shards import (
    GatheredWeights,
    ReplicaWeights,
    ResidentWeights,
    StageShard,
    StageWeights,
    WeightBuffer,
)
from weft.run.state.stepped import OwnRange, SteppedWeights
from weft.sync.base import Gatherer, Meeting


@dataclass(frozen=True, slots=True)
class StageStates:
    """The states of a rank's stages, each mapping by stage.

    Attributes:
        buckets: gradients.
        shards: the stages with weights or states that the rank shards with other replicas.
        stepped: the stages with optimizers that step other tensors than the parameters.
    """

    buckets: Mapping[int, GradientBucket]
    shards: Mapping[int, StageShard]
    stepped: Mapping[int, SteppedWeights]


def make_states(
    layouts: Mapping[int, FlatLayout],
    optimizers: Mapping[int, torch.optim.Optimizer],
    meetings: Mapping[int, Meeting],
    sharding: str,
    *,
    gatherer: Gatherer | None = None,
    dtype: torch.dtype,
    stepped_dtype: torch.dtype,
) -> StageStates:
    """Build the states of a rank's stages. Their parameters become views of flat weights of type `dtype`.

    Args:
        layouts: of all stages of the rank; each has one shard per rank of its group.
        optimizers: made for whole stages.
        meetings: of the ranks that shard a stage, for the sharded stages.
        sharding: the ZeRO level of the groups; `zero-0` has none.
        gatherer: gathers weights that stay on all ranks; None: they are gathered as they are.
        stepped_dtype: the type of masters and gradients; at the call, parameters have it, too.
    """
    few = bool(meetings) and sharding in ("zero-2", "zero-3")
    buckets = make_buckets(layouts, SHARDED_BUFFERS if few else len(layouts), stepped_dtype)
    rooms = _weight_buffers(layouts, dtype) if meetings and sharding == "zero-3" else {}
    shards: dict[int, StageShard] = {}
    stepped: dict[int, SteppedWeights] = {}
    for stage, layout in layouts.items():
        group = meetings[stage].group if stage in meetings else None
        if group is None and dtype == stepped_dtype:
            continue
        own = slice(0, layout.length) if group is None else layout.share(group.place)
        masters = layout.flatten(stepped_dtype)
        weights: StageWeights
        if stage in rooms:
            weights = GatheredWeights(layout, masters.to(dtype), own, rooms[stage])
        elif gatherer is not None and stage in meetings:
            weights = ReplicaWeights(layout, masters.to(dtype), own, gatherer, meetings[stage])
        else:
            weights = ResidentWeights(layout, masters.to(dtype), own)
        gradient = layout.zeros(own.stop - own.start, stepped_dtype) if few else buckets[stage].flat[own]
        if group is not None:
            shards[stage] = StageShard(weights, gradient, group)
        if dtype == stepped_dtype:
            masters = weights.own
        elif group is not None:
            # Copy the range, so that the rest of the stage is freed.
            masters = masters[own].clone()
        stepped[stage] = SteppedWeights(
            layout, OwnRange(own.start, weights.own, masters, gradient, group), optimizers[stage]
        )
    return StageStates(buckets, shards, stepped)


def _weight_buffers(layouts: Mapping[int, FlatLayout], dtype: torch.dtype) -> dict[int, WeightBuffer]:
    """Return the buffer of each stage: the j-th uses buffer j mod `SHARDED_BUFFERS`, as in the Program."""
    stages, rooms = sorted(layouts), dict[int, WeightBuffer]()
    for first in range(min(SHARDED_BUFFERS, len(stages))):
        turns = stages[first::SHARDED_BUFFERS]
        rooms |= dict.fromkeys(turns, WeightBuffer([layouts[stage] for stage in turns], dtype))
    return rooms
