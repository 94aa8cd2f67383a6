"""Rows whose optimizers need norms of whole tensors, of which ranks have pieces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import convolutional_jobs
from asked_methods import CLIPS
from equality_jobs import SHORTENING
from equality_table import Row
from methods.rows.gradient_norm import Clips
from methods.rows.local_averaging import Averages
from methods.rows.offload import Offloads
from one_process import Copy, Method, Told
from small_plans import divisible, tiny


@dataclass(frozen=True)
class UnitGradient(Method):
    """What NVLAMB steps with: the gradient divided by its norm."""

    choices = CLIPS

    def before_step(self, copy: Copy, step: int, told: Told) -> None:
        gradients = [one.grad for one in copy.masters.parameters() if one.grad is not None]
        norm = sum(one.square().sum() for one in gradients) ** 0.5
        for one in gradients:
            one.div_(norm)
        told["gradient_norm"] = [float(norm)]


LAMB = partial(Row, optimizer="lamb", steps=3)
NVLAMB = partial(Row, optimizer="nvlamb", steps=3, methods=(UnitGradient(),))
LANS = partial(Row, optimizer="lans", steps=3)
CLIPPED = partial(LAMB, methods=(Clips(),))
ANOTHERS = partial(Row, optimizer=SHORTENING, steps=3)
WIDE, WIDE_LLAMA = divisible("gpt"), divisible("llama")
ROWS = (
    LAMB(tiny()),
    *(made(tiny(), dp=3, micro_batches=2, sharding="zero-1") for made in (LAMB, NVLAMB, LANS)),
    *(LANS(tiny(), "breadth-first", pp=2, dp=2, loops=2, sharding=level) for level in ("zero-2", "zero-3")),
    LAMB(tiny(), "depth-first", pp=2, dp=2, loops=2, sharding="zero-2", shares=(2, 4)),
    LAMB(tiny(), "zb-v", pp=2, dp=2, loops=2, sharding="zero-3"),
    LAMB(tiny("llama"), "1f1b", pp=2, dp=2, layers=(5, 3), shares=(2, 5), sharding="zero-1"),
    # Masters in fp32; sums are fp64 numbers, whose order leaves no trace in them.
    *(
        made(tiny("llama"), "1f1b", pp=2, dp=2, sharding="zero-1", precision="bf16", same_bits=True)
        for made in (LAMB, LANS)
    ),
    # Copies of a tied weight stay whole, and equal.
    LANS(tiny(tied=True), "1f1b", pp=2, dp=2, sharding="zero-1"),
    LAMB(divisible("bert", tied=True), "1f1b", pp=2, tp=2),
    NVLAMB(divisible("gpt", tied=True), "1f1b", pp=2, tp=2, dp=2, sharding="zero-1"),
    # Tensor and context ranks; islands.
    LAMB(WIDE, tp=2),
    LANS(WIDE_LLAMA, dp=2, tp=2, sharding="zero-3"),
    LANS(WIDE, cp=2, dp=2, sharding="zero-1", loss="tokens"),
    LANS(tiny(), "chimera", pp=2, dp=2, sharding="zero-3", island=2),
    # Ratios of norms do not show elements that are all counted twice; lengths do.
    ANOTHERS(tiny(), dp=2),
    ANOTHERS(tiny(), micro_batches=2, dp=4, sharding="zero-1", island=2),
    ANOTHERS(WIDE_LLAMA, cp=2, tp=2),
    ANOTHERS(WIDE, dp=2, tp=2, sharding="zero-1", methods=(Clips(),)),
    # Clipping; states that are away until the first exchange; replicas that step by themselves.
    CLIPPED(tiny(tied=True), "1f1b", pp=2, dp=2, sharding="zero-1"),
    CLIPPED(WIDE, dp=2, tp=2, sharding="zero-2"),
    LANS(tiny(), "breadth-first", pp=2, dp=2, loops=3, sharding="zero-1", methods=(Offloads(),)),
    LANS(WIDE, dp=2, tp=2, steps=4, methods=(Averages(2),)),
    # Batch norms.
    CLIPPED(convolutional_jobs.tiny("resnet"), dp=2, sharding="zero-1"),
)
