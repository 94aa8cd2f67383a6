"""`HeldShards`: the shards of a stage's gradient that a rank reduces among replicas of unlike tensor degrees.

Each tensor rank of the widest replica holds a shard of the stage. A rank of a replica with half as many
tensor ranks holds two of them, and so on. It copies a shard out of its gradient, in the order of the widest
replica's flat tensors. It adds the shard up with the other replicas, and copies the sum back. Parameters
that all tensor ranks have whole are in every shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from weft.run.parallel.tensor_layers import Division
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.stage.stage_module import StageModule
from weft.run.state.bucket import FlatLayout, GradientBucket


class HeldShards:
    """The shards of one stage on one rank.

    Args:
        module: the stage, or the rank's share of it.
        bucket: its flat gradient.
        degree: the tensor ranks of the widest replica, a multiple of the stage's own.
    """

    def __init__(self, module: StageModule, bucket: GradientBucket, degree: int) -> None:
        self._bucket, self._ranks = bucket, module.tensor
        self.count = degree // module.tensor.size
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        known = module.possible_divisions()
        self._divisions = [known.get(names[id(one)]) for one in bucket.parameters]
        self._degree = degree
        shard = TensorRanks(0, degree)
        shapes = (
            one.shape if division is None else _divided(one.shape, division, shard)
            for one, division in zip(bucket.parameters, self._divisions, strict=True)
        )
        held = nn.ParameterList(nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes)
        self._layout = FlatLayout.of(held, bucket.shards)

    def reduce(self, shard: int, add_up: Callable[[torch.Tensor], None]) -> None:
        """Replace a shard of the gradient by its sum over the replicas.

        Args:
            shard: its number among those of the widest replica; a rank reduces its own in rising order.
            add_up: adds up a flat tensor in place, shape (n,).
        """
        flat = torch.zeros(
            self._layout.length, dtype=self._bucket.flat.dtype, device=self._bucket.flat.device
        )
        for own, copied, _ in self._pairs(flat, shard):
            copied.copy_(own)
        add_up(flat)
        # Later shards also send the gradients of whole parameters, so these stay until the last one.
        last = shard == (self._ranks.place + 1) * self.count - 1
        for own, summed, whole in self._pairs(flat, shard):
            if last or not whole:
                own.copy_(summed)

    def _pairs(self, flat: torch.Tensor, shard: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
        """Yield parts of the gradient with their places in a flat shard, and True for whole parameters."""
        views = self._bucket.layout.views(self._bucket.flat), self._layout.views(flat)
        for division, own, there in zip(self._divisions, *views, strict=True):
            if division is None:
                yield own, there, True
                continue
            length, axis = division.length // division.blocks, division.axis
            of_shard = TensorRanks(shard, self._degree).share(length)
            start = of_shard.start - self._ranks.share(length).start
            chunks = (one.chunk(division.blocks, axis) for one in (own, there))
            for block, place in zip(*chunks, strict=True):
                size = len(of_shard)
                yield block.narrow(axis, start, size), place.narrow(axis, 0, size), False


def _divided(shape: torch.Size, division: Division, ranks: TensorRanks) -> torch.Size:
    sizes = list(shape)
    sizes[division.axis] = division.own_length(ranks)
    return torch.Size(sizes)
