"""Rows whose expert ranks exchange between segments of passes; one process exchanges nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from decoder_models import tiny_decoder
from equality_table import Row
from methods.rows.expert_balance import MOVES, SIGMOID, Balances
from methods.rows.gradient_norm import Clips
from one_process import Method

from weft.describe.plan import Choice
from weft.methods.expert_exchanges.program import NAME, Way


@dataclass(frozen=True)
class Exchanges(Method):
    """Expert exchanges that run in one of the ways there are."""

    way: Way
    ranks_per_node: int = 1

    @property
    def choices(self) -> tuple[Choice, ...]:
        levels = {} if self.ranks_per_node == 1 else {"ranks_per_node": self.ranks_per_node}
        return (Choice(name=NAME, options={"run": self.way, **levels}),)


SHORT = partial(tiny_decoder, num_hidden_layers=2, vocab_size=19, max_position_embeddings=8)
MIXTRAL = SHORT("mixtral", intermediate_size=24)
BETWEEN, INTERLEAVED = map(Exchanges, ("instructions", "interleaved"))
SHARED_EXPERTS = SHORT("qwen2_moe", mlp_only_layers=[1])
BALANCED = partial(Row, MIXTRAL, masks=True)
# Tensor ranks do not divide seven tokens: each has the whole stream.
ODD = SHORT("mixtral", intermediate_size=24, max_position_embeddings=7)
ROUNDED = partial(Row, tolerance=1e-5)
FOUR = SHORT("qwen2_moe", mlp_only_layers=[1], num_experts=4)
LEVELS = partial(Row, FOUR, ep=4, micro_batch_size=4)
ROWS = (
    Row(MIXTRAL, "1f1b", pp=2, ep=2, methods=(BETWEEN,)),
    Row(MIXTRAL, ep=3, micro_batch_size=3, micro_batches=2, methods=(INTERLEAVED,)),
    Row(SHARED_EXPERTS, dp=2, ep=2, sharding="zero-2", methods=(INTERLEAVED, Clips(0.2))),
    Row(MIXTRAL, "breadth-first", dp=2, ep=2, loops=2, sharding="zero-3", methods=(INTERLEAVED,)),
    Row(MIXTRAL, "1f1b", pp=2, ep=2, transport="device", methods=(BETWEEN,)),
    Row(SHARED_EXPERTS, "breadth-first", dp=2, ep=2, loops=2, transport="device", methods=(INTERLEAVED,)),
    Row(MIXTRAL, ep=2, evaluates=True, methods=(INTERLEAVED,)),
    # Segments that run again from their inputs.
    Row(MIXTRAL, "1f1b", pp=2, ep=2, recompute=("full", "selective"), methods=(BETWEEN,)),
    Row(SHARED_EXPERTS, dp=2, ep=2, sharding="zero-2", recompute="full", methods=(INTERLEAVED, Clips(0.2))),
    BALANCED(ep=2, recompute="full", methods=(Balances("sequence", ranks=2), INTERLEAVED)),
    # A router that has run again has also decided for the next mixture's root.
    Row(SHORT("qwen2_moe"), "1f1b", ep=2, recompute="full", methods=(Balances("sequence", ranks=2), BETWEEN)),
    # Backward passes in two parts, whose input parts are in segments.
    Row(MIXTRAL, "zb-h1", pp=2, ep=2, evaluates=True, methods=(BETWEEN,)),
    Row(SHARED_EXPERTS, "zb-v", pp=2, ep=2, loops=2, recompute="full", methods=(INTERLEAVED, Clips(0.2))),
    BALANCED("zb-h1", pp=2, ep=2, methods=(Balances("buffer", samples=2, replicas=1, ranks=2), BETWEEN)),
    # Others divide the columns of each expert, or the tokens, and exchange inside of segments.
    ROUNDED(MIXTRAL, "1f1b", pp=2, tp=2, ep=2, methods=(BETWEEN,)),
    ROUNDED(SHARED_EXPERTS, dp=2, tp=2, ep=2, sharding="zero-2", methods=(INTERLEAVED, Clips(0.2))),
    ROUNDED(ODD, tp=2, ep=2, recompute="full", evaluates=True, methods=(INTERLEAVED,)),
    ROUNDED(SHARED_EXPERTS, "zb-h1", pp=2, tp=2, ep=2, recompute="selective", methods=(BETWEEN,)),
    ROUNDED(MIXTRAL, "zb-v", pp=2, tp=2, ep=2, loops=2, methods=(INTERLEAVED,)),
    ROUNDED(SHARED_EXPERTS, "breadth-first", tp=2, ep=2, loops=2, transport="device", methods=(INTERLEAVED,)),
    Row(MIXTRAL, "breadth-first", dp=2, cp=2, ep=2, loops=2, sharding="zero-3", methods=(INTERLEAVED,)),
    Row(SHARED_EXPERTS, "1f1b", pp=2, cp=2, ep=2, recompute="full", masks=True, methods=(BETWEEN,)),
    Row(MIXTRAL, "zb-h1", pp=2, cp=2, ep=2, methods=(BETWEEN, Clips(0.2))),
    ROUNDED(SHARED_EXPERTS, tp=2, cp=2, ep=2, methods=(INTERLEAVED,)),
    BALANCED(cp=2, ep=2, methods=(Balances("sequence", ranks=2), INTERLEAVED)),
    BALANCED(tp=2, ep=2, tolerance=1e-5, methods=(Balances("sequence", ranks=2), INTERLEAVED)),
    # Ranks of a node exchange first, then those with one place on all nodes.
    LEVELS(methods=(Exchanges("inside", 2), Clips(0.2))),
    LEVELS("1f1b", recompute="full", transport="device", methods=(Exchanges("instructions", 2),)),
    LEVELS("zb-h1", evaluates=True, methods=(Exchanges("interleaved", 2),)),
    # Balances, whose losses begin between the borders.
    Row(MIXTRAL, dp=2, ep=2, masks=True, methods=(Balances(ranks=2), INTERLEAVED)),
    BALANCED("1f1b", pp=2, ep=2, methods=(Balances("buffer", samples=2, replicas=1, ranks=2), BETWEEN)),
    BALANCED(ep=2, methods=(Balances("synchronised", samples=2, replicas=1, ranks=2), INTERLEAVED)),
    BALANCED("1f1b", ep=2, methods=(Balances("sequence", ranks=2), INTERLEAVED, Clips(0.2))),
    Row(SIGMOID, dp=2, ep=2, tolerance=1e-5, methods=(Balances(bias_rate=0.2, ranks=2), INTERLEAVED)),
    BALANCED(ep=2, evaluates=True, methods=(Balances(capacity=1.0, ranks=2), INTERLEAVED)),
    BALANCED(ep=2, optimizer="adamw", steps=3, methods=(Balances(ranks=2, moves=MOVES), INTERLEAVED)),
)
