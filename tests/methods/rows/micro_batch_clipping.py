"""Rows with clipped micro-batches: one process clips all gradients of a step when it has all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from decoder_models import tiny_decoder
from equality_table import Row
from methods.rows.expert_balance import Balances
from methods.rows.expert_exchanges import BETWEEN as EXCHANGES
from methods.rows.gradient_norm import Clips
from methods.rows.micro_batch_norms import TellsNorms
from methods.rows.tensor_collectives import Collectives
from one_process import Copy, Method, Told, trained
from small_plans import divisible, tiny

from weft.describe.plan import Choice
from weft.run.runtime import RankRuntime

# The gradients of a step's micro-batches, one by one, and the bounds of the next step.
_SEEN: WeakKeyDictionary[Copy, list[torch.Tensor]] = WeakKeyDictionary()
_BOUNDS: WeakKeyDictionary[Copy, dict[tuple[int, int], float]] = WeakKeyDictionary()


def _layer(name: str, layers: int) -> int:
    """The position of a parameter's layer: embeddings, blocks, and the rest in the last layer."""
    block = re.search(r"\.(\d+)\.", name)
    if block is not None:
        return 1 + int(block[1])
    return 0 if re.search(r"embed|wte|wpe", name) else layers - 1


@dataclass(frozen=True)
class ClipsMicro(Method):
    """Clipping of groups of `samples`; `size`: those of one micro-batch of the plan."""

    micro: str = "min"
    samples: int = 2
    size: int = 2
    bound: float | None = None
    quantile: float | None = None
    sources: int = 1
    # The layers of each stage with a norm of its own; none: the model has one norm.
    cut: tuple[int, ...] = ()

    def __repr__(self) -> str:
        changed = [
            f", {one.name} {getattr(self, one.name)}"
            for one in fields(self)[1:]
            if getattr(self, one.name) != one.default
        ]
        return f"ClipsMicro({self.micro}{''.join(changed)})"

    @property
    def choices(self) -> tuple[Choice, ...]:
        given: dict[str, Any] = {"micro": self.micro, "samples": self.samples}
        given |= {} if self.bound is None else {"bound": self.bound}
        given |= {} if self.quantile is None else {"quantile": self.quantile}
        given |= {"sources": self.sources} if self.sources > 1 else {}
        given |= {"scope": "stage", "layers_per_stage": ",".join(map(str, self.cut))} if self.cut else {}
        return (Choice(name="micro-batch-clipping", options=given),)

    def attach(self, runtime: RankRuntime) -> None:
        for state in runtime.methods.values():
            state.take_sources(lambda step: np.repeat(self._sources(step, 8), self.samples))

    def _sources(self, step: int, count: int) -> list[int]:
        """The source of each clipped micro-batch, not the same for all replicas."""
        return [(number // 3 + step) % self.sources for number in range(count)]

    def see(self, copy: Copy, gradients: Sequence[torch.Tensor], told: Told) -> None:
        own = torch.cat([one.detach().double().flatten() for one in gradients])
        _SEEN.setdefault(copy, []).append(own)

    def before_step(self, copy: Copy, step: int, told: Told) -> None:
        seen, together = _SEEN.pop(copy), self.samples // self.size
        parts = [sum(seen[at : at + together]) for at in range(0, len(seen), together)]
        means = [len(parts) * one for one in parts]
        owners = self._sources(step, len(means))
        before = _BOUNDS.setdefault(copy, {})
        whole = torch.zeros_like(means[0])
        numbers: list[Told] = []
        for stage, mask in enumerate(self._stages(copy)):
            own: Told = {}
            whole += self._clipped([one * mask for one in means], owners, before, stage, own)
            numbers.append(own)
        if self.cut:
            names = ("clip_bound", "clipped", "dropped")
            told.update({name: [sum(one[name][0] for one in numbers) / len(numbers)] for name in names})
        else:
            told.update(numbers[0])
        start = 0
        for parameter in trained(copy.masters):
            end = start + parameter.numel()
            parameter.grad = whole[start:end].view_as(parameter).to(parameter.dtype)
            start = end

    def _stages(self, copy: Copy) -> list[torch.Tensor]:
        """For each stage with a norm, one at its elements of the gradient and zero at others."""
        named = [
            (name, one)
            for name, one in copy.masters.named_parameters()
            if any(one is own for own in trained(copy.masters))
        ]
        ends = list(accumulate(self.cut)) or [10**6]
        layers = torch.cat(
            [torch.full((one.numel(),), _layer(name, ends[-1]), dtype=torch.float64) for name, one in named]
        )
        return [
            ((layers >= first) & (layers < last)).double()
            for first, last in zip([0, *ends[:-1]], ends, strict=True)
        ]

    def _clipped(
        self,
        means: Sequence[torch.Tensor],
        owners: Sequence[int],
        before: dict[tuple[int, int], float],
        stage: int,
        told: Told,
    ) -> torch.Tensor:
        """The mean of clipped gradients; `before` has the bounds of the step before by stage and source."""
        norms = [one.norm().item() for one in means]
        own = [
            [norm for norm, owner in zip(norms, owners, strict=True) if owner == one]
            for one in range(self.sources)
        ]
        last = [before.get((stage, one), math.inf) for one in range(self.sources)]
        bounds = [self._bound(some, known) for some, known in zip(own, last, strict=True)]
        if self.quantile is not None:
            for one, some in enumerate(own):
                if some:
                    before[stage, one] = sorted(some)[round(self.quantile * (len(some) - 1))]
        kept = [bounds[owner] for owner in owners]
        scales = [
            bound / norm if self.micro == "min" else min(1.0, bound / norm)
            for bound, norm in zip(kept, norms, strict=True)
        ]
        told_bounds = [
            max(own[owner]) if bound == math.inf else bound for bound, owner in zip(kept, owners, strict=True)
        ]
        told["clip_norms"] = norms
        told["clip_bound"], told["dropped"] = [sum(told_bounds) / len(norms)], [0.0]
        if self.sources > 1:
            told["clip_bounds"] = told_bounds
        told["clipped"] = [sum(one > bound for one, bound in zip(norms, kept, strict=True)) / len(norms)]
        each = [one * scale for one, scale in zip(means, scales, strict=True)]
        return torch.stack(each).mean(0)

    def _bound(self, norms: Sequence[float], before: float) -> float:
        return (
            min(norms, default=0.0) if self.micro == "min" else before if self.bound is None else self.bound
        )


GPT, LLAMA, WIDE = tiny(layers=4), tiny("llama", layers=4), divisible("llama")
SHORT = partial(tiny_decoder, num_hidden_layers=2, vocab_size=19, max_position_embeddings=8)
MIXTRAL = SHORT("mixtral", intermediate_size=24)
FIXED = ClipsMicro("fixed", bound=1.5)
STAGES = ClipsMicro(cut=(1, 2, 1, 2))
CLIPPED = partial(Row, methods=(ClipsMicro(),))
ROWS = (
    CLIPPED(GPT),
    CLIPPED(GPT, "1f1b", pp=2, dp=2),
    CLIPPED(LLAMA, "1f1b", pp=3, micro_batches=6, recompute="full"),
    CLIPPED(GPT, "gpipe", pp=2, dp=2, sharding="zero-1", methods=(ClipsMicro(), Clips(0.2))),
    CLIPPED(LLAMA, dp=2, sharding="zero-2"),
    CLIPPED(LLAMA, dp=2, sharding="zero-3", methods=(FIXED, TellsNorms())),
    CLIPPED(LLAMA, "1f1b", pp=2, methods=(ClipsMicro("quantile", quantile=0.5),), steps=3),
    # Two micro-batches of the plan are one that is clipped.
    CLIPPED(GPT, "1f1b", pp=2, dp=2, methods=(ClipsMicro(samples=4),)),
    CLIPPED(WIDE, tp=2),
    CLIPPED(WIDE, "1f1b", pp=2, cp=2),
    CLIPPED(MIXTRAL, ep=2, methods=(ClipsMicro(), Balances("sequence", ranks=2))),
    CLIPPED(MIXTRAL, tp=2, ep=2, tolerance=1e-5, methods=(ClipsMicro(),)),
    # Two sources, each with its bound.
    CLIPPED(GPT, "1f1b", pp=2, dp=2, methods=(ClipsMicro(sources=2),)),
    CLIPPED(
        LLAMA, dp=2, sharding="zero-2", methods=(ClipsMicro("quantile", quantile=0.5, sources=2),), steps=3
    ),
    # Split backward passes: a gradient is whole after its weight part.
    CLIPPED(GPT, "zb-h1", pp=2, dp=2),
    CLIPPED(LLAMA, "zb-h1", pp=3, micro_batches=6, sharding="zero-2", methods=(ClipsMicro(samples=4),)),
    CLIPPED(GPT, "zb-v", pp=2, dp=2, loops=2, sharding="zero-3"),
    CLIPPED(WIDE, "zb-v", pp=2, tp=2, loops=2, methods=(FIXED, Clips(0.2))),
    # Several stages on a device: they wait for each other.
    CLIPPED(GPT, "breadth-first", pp=2, dp=2, loops=2, sharding="zero-1"),
    CLIPPED(LLAMA, "depth-first", pp=2, dp=2, loops=2, sharding="zero-2", methods=(ClipsMicro(samples=4),)),
    CLIPPED(
        LLAMA,
        "hybrid",
        pp=2,
        loops=2,
        micro_batches=8,
        methods=(ClipsMicro("quantile", quantile=0.5, sources=2),),
        steps=3,
    ),
    CLIPPED(MIXTRAL, "breadth-first", pp=2, loops=2, methods=(ClipsMicro(), Balances("global-batch"))),
    # Stages clip by norms of their own.
    CLIPPED(GPT, "1f1b", pp=2, dp=2, methods=(ClipsMicro(cut=(3, 3)),)),
    CLIPPED(GPT, "zb-v", pp=2, dp=2, loops=2, sharding="zero-1", methods=(STAGES, Clips(0.2))),
    CLIPPED(LLAMA, "breadth-first", pp=2, loops=2, sharding="zero-2", methods=(STAGES,)),
    CLIPPED(
        LLAMA,
        "zb-h1",
        pp=2,
        dp=2,
        steps=3,
        methods=(ClipsMicro("quantile", quantile=0.5, sources=2, cut=(3, 3)),),
    ),
    CLIPPED(WIDE, "1f1b", pp=2, tp=2, methods=(ClipsMicro("fixed", bound=0.5, samples=4, cut=(2, 2)),)),
    # Passes in segments, which add to one gradient after the other.
    CLIPPED(MIXTRAL, "1f1b", pp=2, ep=2, tolerance=1e-5, methods=(ClipsMicro(), EXCHANGES)),
    CLIPPED(
        MIXTRAL,
        dp=2,
        ep=2,
        sharding="zero-2",
        recompute="full",
        tolerance=1e-5,
        methods=(ClipsMicro(samples=4), EXCHANGES),
    ),
    CLIPPED(WIDE, "1f1b", pp=2, tp=2, methods=(ClipsMicro(), Collectives("instructions"))),
    CLIPPED(WIDE, dp=2, tp=2, methods=(ClipsMicro(sources=2), Collectives("overlapped"), Clips(0.2))),
    # All of a step in one micro-batch: nothing is clipped.
    CLIPPED(GPT, pp=2, micro_batches=1),
)
