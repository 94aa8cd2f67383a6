"""Rows with packed samples: one process attends inside the same documents."""

from __future__ import annotations

from dataclasses import dataclass

from decoder_models import tiny_decoder
from equality_table import Row
from methods.rows.attention_window import Windows
from methods.rows.lora import LowRank
from methods.rows.tensor_collectives import OVERLAPPED
from one_process import Method
from small_plans import divisible, tiny

from weft.describe.plan import PACKING, Choice


@dataclass(frozen=True)
class Packs(Method):
    """Samples of several documents."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        return (Choice(name=PACKING),)


PACKS = Packs()
GPT, LLAMA = tiny(layers=4), tiny("llama", layers=4)
WIDE_GPT, WIDE_LLAMA = divisible("gpt"), divisible("llama")
ROWS = (
    Row(GPT, "1f1b", pp=4, evaluates=True, methods=(PACKS,)),
    Row(LLAMA, "1f1b", pp=2, dp=2, evaluates=True, methods=(PACKS,)),
    Row(LLAMA, "zb-h1", pp=2, methods=(PACKS,)),
    Row(LLAMA, "zb-v", pp=2, loops=2, methods=(PACKS,)),
    # A recomputed pass knows its own documents, not those of the micro-batch that came last.
    Row(LLAMA, "breadth-first", pp=2, loops=2, recompute="full", methods=(PACKS,)),
    Row(GPT, "1f1b", pp=2, recompute="selective", methods=(PACKS,)),
    Row(LLAMA, "1f1b", dp=2, sharding="zero-3", methods=(PACKS,)),
    Row(WIDE_GPT, "1f1b", tp=2, methods=(PACKS,)),
    Row(WIDE_LLAMA, "1f1b", tp=2, pp=2, evaluates=True, methods=(PACKS,)),
    Row(WIDE_LLAMA, "1f1b", tp=2, methods=(PACKS, OVERLAPPED)),
    Row(WIDE_GPT, "1f1b", tp=2, pp=2, methods=(PACKS, OVERLAPPED)),
    Row(LLAMA, "1f1b", pp=2, splits=(1, 2), methods=(PACKS,)),
    Row(LLAMA, "1f1b", pp=2, methods=(PACKS, LowRank())),
    Row(LLAMA, "1f1b", pp=2, recompute="full", methods=(PACKS, Windows())),
    Row(tiny_decoder("gemma2"), "1f1b", pp=2, recompute="full", methods=(PACKS,)),
    Row(tiny_decoder("gemma3_text"), "1f1b", pp=2, methods=(PACKS,)),
    Row(LLAMA, "1f1b", pp=2, precision="bf16", tolerance=0.05, methods=(PACKS,)),
)
