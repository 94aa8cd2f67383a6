"""Rows whose loss makes logits in chunks of tokens; one process makes all of them at once."""

from __future__ import annotations

from equality_table import Row
from methods.rows.gradient_norm import Clips
from methods.rows.micro_batch_norms import TellsNorms
from methods.rows.tensor_collectives import OVERLAPPED
from small_plans import divisible, tiny

from weft.describe.loss_choice import BY_SIZE

GPT, LLAMA, BERT = (divisible(family) for family in ("gpt", "llama", "bert"))
# Sixteen tokens in a micro-batch, in chunks that divide them or not.
ROWS = (
    Row(tiny(), chunks=BY_SIZE, evaluates=True, methods=(TellsNorms(),)),
    Row(tiny("llama"), "1f1b", pp=2, dp=2, sharding="zero-3", chunks=5, recompute="selective"),
    Row(tiny("bert", tied=True), "1f1b", pp=2, chunks=3, recompute="full"),
    Row(tiny(tied=True), "zb-h1", pp=2, chunks=BY_SIZE, methods=(Clips(0.2),)),
    Row(divisible("gpt", tied=True), chunks=7, splits=(2,)),
    Row(LLAMA, tp=2, chunks=6),
    Row(divisible("bert", sequence=7, tied=True), tp=2, chunks=1, evaluates=True),
    Row(GPT, "1f1b", pp=2, tp=2, chunks=5, methods=(OVERLAPPED,)),
    Row(GPT, cp=2, chunks=3, masks=True),
    Row(BERT, cp=2, tp=2, chunks=BY_SIZE, masks=True),
)
