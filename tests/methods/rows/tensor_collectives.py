"""Rows whose tensor ranks exchange between segments of passes; one process exchanges nothing."""

from __future__ import annotations

from dataclasses import dataclass

from equality_table import Row
from methods.rows.expert_balance import MIXTRAL, Balances
from methods.rows.gradient_norm import Clips
from methods.rows.micro_batch_norms import TellsNorms
from one_process import Method
from small_plans import divisible

from weft.describe.plan import Choice
from weft.methods.tensor_collectives.program import NAME, Way


@dataclass(frozen=True)
class Collectives(Method):
    """Tensor collectives that run in one of the ways there are."""

    way: Way

    @property
    def choices(self) -> tuple[Choice, ...]:
        return (Choice(name=NAME, options={"run": self.way}),)


GPT, LLAMA, BERT = (divisible(family) for family in ("gpt", "llama", "bert"))
TIED = divisible("gpt", tied=True)
BETWEEN, OVERLAPPED, INTERLEAVED = map(Collectives, ("instructions", "overlapped", "interleaved"))
ROWS = (
    Row(LLAMA, tp=2, methods=(OVERLAPPED,)),
    Row(LLAMA, tp=2, methods=(INTERLEAVED, TellsNorms())),
    Row(BERT, "1f1b", tp=2, methods=(BETWEEN,)),
    Row(GPT, "1f1b", pp=2, tp=2, splits=(1, 2), methods=(BETWEEN,)),
    Row(GPT, "breadth-first", dp=2, tp=2, loops=2, sharding="zero-3", methods=(INTERLEAVED, Clips(0.2))),
    Row(TIED, tp=2, loss="tokens", methods=(OVERLAPPED, TellsNorms())),
    Row(TIED, "1f1b", pp=2, tp=2, methods=(OVERLAPPED,)),
    # One weight part has those of all segments of its pass.
    Row(GPT, "zb-h1", pp=2, tp=2, methods=(BETWEEN,)),
    Row(LLAMA, "zb-v", pp=2, tp=2, loops=2, recompute="full", methods=(BETWEEN, TellsNorms())),
    Row(BERT, "zb-h1", pp=2, tp=2, methods=(OVERLAPPED,)),
    Row(TIED, "zb-h1", pp=2, tp=2, methods=(INTERLEAVED, Clips(0.2))),
    # Segments that run again from their inputs.
    Row(LLAMA, "1f1b", pp=2, tp=2, recompute=("full", "selective"), methods=(OVERLAPPED,)),
    Row(GPT, dp=2, tp=2, recompute="full", methods=(INTERLEAVED, Clips(0.2))),
    Row(MIXTRAL, tp=2, tolerance=1e-5, methods=(Balances(samples=1, micro_weight=0.3), OVERLAPPED)),
    Row(MIXTRAL, "1f1b", tp=2, tolerance=1e-5, methods=(Balances("sequence"), INTERLEAVED)),
)
