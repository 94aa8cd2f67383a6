"""Rows whose expert ranks exchange between segments of passes; one process exchanges nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from decoder_models import tiny_decoder
from equality_table import Row
from one_process import Method

from weft.describe.plan import Choice
from weft.methods.expert_exchanges.program import NAME, Way


@dataclass(frozen=True)
class Exchanges(Method):
    """Expert exchanges that run in one of the ways there are."""

    way: Way

    @property
    def choices(self) -> tuple[Choice, ...]:
        return (Choice(name=NAME, options={"run": self.way}),)


SHORT = partial(tiny_decoder, num_hidden_layers=2, vocab_size=19, max_position_embeddings=8)
MIXTRAL = SHORT("mixtral", intermediate_size=24)
BETWEEN, INTERLEAVED = map(Exchanges, ("instructions", "interleaved"))
ROWS = (Row(MIXTRAL, ep=2, methods=(BETWEEN,)),)
