"""Rows whose replicas send few bits: one process quantises the same numbers with the same keys.

Groups of numbers with one scale, and the keys of their rounding, follow from the shares of a stage. So one
process cuts its parameters as the plan does. All bits are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from equality_table import Row
from methods.rows.gradient_norm import Clips
from one_process import Copy, Method
from small_jobs import SEED
from small_plans import tiny
from torch import nn

from weft.describe.plan import Choice
from weft.methods.sdp4bit.options import Sdp4BitOptions
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage
from weft.run.state.bucket import FlatLayout
from weft.sync.codecs.counter import Key
from weft.sync.codecs.quantiser import Quantiser, unsmooth_


@dataclass(frozen=True)
class FewBits(Method):
    """`replicas` in nodes of `per_node`; `layers` of each stage."""

    replicas: int
    per_node: int = 1
    layers: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    by_share = True

    @property
    def sync(self) -> Choice:
        return Choice(name="sdp4bit", options=dict(self.options) | {"replicas_per_node": self.per_node})

    @property
    def table(self) -> Sdp4BitOptions:
        return Sdp4BitOptions.model_validate(dict(self.sync.options))

    def stages(self, copy: Copy, model: nn.Module) -> list[FlatLayout]:
        """The flat layout of each stage's parameters of a model."""
        config, parameters = copy.training.model, dict(model.named_parameters())
        borders = list(accumulate(self.layers or (config.layers + 2,), initial=0))
        stages = (build_stage(config, range(*pair), SEED, torch.float32) for pair in pairwise(borders))
        return [
            FlatLayout.of(
                nn.ParameterList([parameters[name] for name, _ in stage.named_parameters()]), self.replicas
            )
            for stage in stages
        ]

    def gradient_key(self, what: str, stage: int, step: int, replica: int) -> Key:
        return Key.of(SEED, what, stage, step, 0, replica)

    def reduce(
        self, copy: Copy, step: int, addends: Sequence[Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        own = list(copy.masters.parameters())
        if self.table.gradients == "whole":
            return [sum(same) for same in zip(*addends, strict=True)]
        sums = {}
        for stage, layout in enumerate(self.stages(copy, copy.masters)):
            flats = []
            for gradients in addends:
                of = {id(parameter): one for parameter, one in zip(own, gradients, strict=True)}
                flat = layout.zeros(layout.length, gradients[0].dtype)
                for parameter, view in zip(layout.parameters, layout.views(flat), strict=True):
                    view.copy_(of[id(parameter)])
                flats.append(flat)
            total = torch.cat([self.share_of(place, flats, stage, step) for place in range(self.replicas)])
            for parameter, view in zip(layout.parameters, layout.views(total), strict=True):
                sums[id(parameter)] = view.clone()
        return [sums[id(parameter)] for parameter in own]

    def share_of(self, place: int, flats: Sequence[torch.Tensor], stage: int, step: int) -> torch.Tensor:
        """The sum that the rank at a place keeps, from the flat gradients of all replicas."""
        table, length = self.table, len(flats[0]) // self.replicas
        mine = slice(place * length, (place + 1) * length)
        levels = 1 < self.per_node < self.replicas
        bits = table.inside_bits if levels or self.per_node == self.replicas else table.gradient_bits
        first = Quantiser(bits=bits, group=table.gradient_group, smooth=table.smooth)
        last = Quantiser(bits=table.gradient_bits, group=table.gradient_group)
        payloads = []
        for replica, flat in enumerate(flats):
            payload = torch.empty(first.payload_bytes(length), dtype=torch.uint8)
            first.encode(
                flat[mine], payload, self.gradient_key("gradient", stage, step, replica), place * length
            )
            payloads.append(payload)
        if levels:
            sums = []
            for node in range(0, self.replicas, self.per_node):
                inside = torch.empty(length)
                first.decode_sum(torch.stack(payloads[node : node + self.per_node]), inside)
                payload = torch.empty(last.payload_bytes(length), dtype=torch.uint8)
                sender = node + place % self.per_node
                key = self.gradient_key("gradient sums", stage, step, sender)
                last.encode(inside, payload, key, place * length)
                sums.append(payload)
            payloads, first = sums, last
        total = torch.empty(length)
        first.decode_sum(torch.stack(payloads), total)
        if table.smooth:
            unsmooth_(total)
        return total.to(flats[0].dtype)

    def publish(self, copy: Copy, step: int) -> None:
        table, masters = (
            self.table,
            dict(zip(copy.model.parameters(), copy.masters.parameters(), strict=True)),
        )
        quantiser = Quantiser(bits=table.weight_bits, group=table.weight_group)
        for stage, layout in enumerate(self.stages(copy, copy.model)):
            weights = layout.flatten(layout.parameters[0].dtype)
            stepped = torch.zeros_like(weights)
            for parameter, view in zip(layout.parameters, layout.views(stepped), strict=True):
                view.copy_(masters[parameter])
            for place in range(self.replicas):
                mine = layout.share(place)
                payload = torch.empty(quantiser.payload_bytes(mine.stop - mine.start), dtype=torch.uint8)
                key = Key.of(SEED, "weights", stage, step + 1, 0, place)
                decoded = torch.empty(mine.stop - mine.start)
                if table.weights == "whole":
                    weights[mine] = stepped[mine]
                elif table.weights == "direct":
                    quantiser.encode(stepped[mine], payload, key)
                    quantiser.decode(payload, decoded)
                    weights[mine] = decoded.to(weights.dtype)
                else:
                    quantiser.encode(stepped[mine] - weights[mine], payload, key)
                    quantiser.decode(payload, decoded)
                    weights[mine] += decoded.to(weights.dtype)
            for parameter, view in zip(layout.parameters, layout.views(weights), strict=True):
                parameter.copy_(view)

    def check(self, runtime: RankRuntime) -> None:
        kinds = {one.kind.name for one in runtime.program.instructions()}
        assert ("reduce_inside" in kinds) == (1 < self.per_node < self.replicas)
        assert ("reduce_between" in kinds) == (self.table.slices > 1)


GPT = tiny(layers=2)
SENT = partial(
    Row, GPT, micro_batches=2, sharding="zero-1", precision="fp32", optimizer="adamw", steps=3, same_bits=True
)
CLOSE = partial(SENT, precision="fp64", same_bits=False)
ROWS = (
    SENT(dp=2, methods=(FewBits(2),)),
    SENT(dp=2, methods=(FewBits(2, 2),), precision="bf16"),
    SENT(dp=4, methods=(FewBits(4, 2),)),
    SENT(dp=4, methods=(FewBits(4, 2, options=(("slices", 3), ("gradient_group", 32))),)),
    SENT(dp=4, methods=(FewBits(4, 2, options=(("smooth", False), ("inside_bits", 4))),), precision="bf16"),
    # Losses and norms are added up in other orders than in one process.
    CLOSE(dp=4, methods=(FewBits(4, 2),), evaluates=True),
    CLOSE(dp=3, methods=(FewBits(3), Clips()), shares=(3, 1, 2)),
    SENT(
        dp=2, methods=(FewBits(2, options=(("weights", "direct"), ("weight_group", 64))),), precision="fp64"
    ),
    SENT(dp=2, methods=(FewBits(2, options=(("weights", "whole"),)),), sharding="zero-3"),
    SENT(dp=2, methods=(FewBits(2, options=(("gradients", "whole"),)),), sharding="zero-2"),
    SENT(dp=2, pp=2, schedule="1f1b", methods=(FewBits(2, layers=(2, 2)),)),
)
