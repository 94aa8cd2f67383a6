"""Rows that move states and activations to the host and back: to the bits of those that keep them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from equality_table import Row
from methods.rows.gradient_norm import Clips
from methods.rows.micro_batch_norms import TellsNorms
from one_process import Method
from small_plans import divisible, tiny

from weft.describe.plan import Choice


@dataclass(frozen=True)
class Offloads(Method):
    """States and activations of all stages, or of some."""

    states: bool | str = True
    activations: bool | str = True

    @property
    def choices(self) -> tuple[Choice, ...]:  # type: ignore[override]
        chosen = {"states": self.states, "activations": self.activations}
        return (Choice(name="offload", options={word: given for word, given in chosen.items() if given}),)


BOTH = (Offloads(),)
STATES, ACTIVATIONS = (Offloads(activations=False),), (Offloads(states=False),)
MOVED = partial(Row, precision="fp32", optimizer="adamw", steps=3, same_bits=True, methods=BOTH)
DROPS = partial(Row, precision="fp32", dropout=0.3, same_bits=True, methods=ACTIVATIONS)
ROWS = (
    MOVED(tiny(), dp=2, micro_batches=5),
    MOVED(tiny("llama"), "1f1b", pp=4, micro_batches=6),
    MOVED(tiny(), "gpipe", pp=2, dp=2, sharding="zero-1"),
    MOVED(tiny(), "breadth-first", pp=2, dp=2, loops=4, sharding="zero-3", micro_batches=2),
    MOVED(tiny(), "depth-first", pp=2, dp=2, loops=3, sharding="zero-2", same_bits=False, precision="fp64"),
    MOVED(tiny("llama"), "zb-h1", pp=4, micro_batches=6, precision="bf16"),
    MOVED(tiny("llama"), "zb-v", pp=2, dp=2, loops=2, sharding="zero-1", precision="bf16"),
    MOVED(tiny(), "chimera", pp=2, micro_batches=8),
    MOVED(tiny(tied=True), "1f1b", pp=2, same_bits=False, precision="fp64"),
    MOVED(tiny("bert"), "gpipe", pp=2, evaluates=True, same_bits=False, precision="fp64"),
    MOVED(tiny(), "1f1b", pp=2, dp=2, methods=(Offloads(states="1", activations="0"),)),
    MOVED(
        tiny(),
        "1f1b",
        pp=2,
        dp=2,
        methods=(*BOTH, Clips()),
        sharding="zero-1",
        same_bits=False,
        precision="fp64",
    ),
    MOVED(tiny(), "gpipe", pp=2, recompute="full", methods=STATES),
    MOVED(
        divisible("gpt"),
        "gpipe",
        pp=2,
        dp=2,
        methods=(*BOTH, TellsNorms()),
        loss="tokens",
        same_bits=False,
        precision="fp64",
    ),
    MOVED(divisible("gpt"), "gpipe", tp=2, same_bits=False, precision="fp64"),
    MOVED(divisible("llama"), "gpipe", cp=2, tp=2, same_bits=False, precision="fp64"),
    DROPS(tiny(), "gpipe", pp=2),
    DROPS(tiny("bert"), "breadth-first", pp=2, loops=2),
)
