"""Values between stages with unlike numbers of tensor ranks: each rank gets the tokens that it holds."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from small_plans import divisible, make_plan

from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.stage.reshaped import Reshaped


class Gathering(TensorRanks):
    """A rank whose replica has these tokens."""

    whole: torch.Tensor

    def gather_tokens(self, stream: torch.Tensor) -> torch.Tensor:
        assert torch.equal(stream, self.own_tokens(self.whole))
        return self.whole


@given(
    degrees=st.sampled_from([(1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (2, 8), (8, 2)]),
    sequence=st.sampled_from((6, 7, 8, 12, 16)),
)
def test_each_rank_of_the_other_stage_gets_the_tokens_that_it_holds_from_one_rank(
    degrees: tuple[int, int], sequence: int
) -> None:
    model = replace(divisible("llama", heads=8), sequence=sequence)
    plan = make_plan(model, pp=2, schedule="1f1b", degrees=degrees)
    size, other = degrees
    divides, theirs = (plan.shape(stage).sequence_parallel > 1 for stage in (0, 1))
    whole = torch.arange(2 * sequence * 3.0).view(2, sequence, 3)
    received = []
    for place in range(size):
        ranks = Gathering(place, size, divides_sequence=divides)
        ranks.whole = whole
        reshaped = Reshaped.between(plan, 0, 1, replica=0, tensor=ranks)
        assert reshaped is not None
        own = ranks.own_tokens(whole)
        parts = reshaped.of(own)
        assert all(tuple(part.shape) == reshaped.shape(tuple(own.shape)) for part in parts)
        received += parts
    held = [TensorRanks(lane, other, divides_sequence=theirs).own_tokens(whole) for lane in range(other)]
    assert len(received) == other
    for part, wanted in zip(received, held, strict=True):
        assert torch.equal(part, wanted)


def test_stages_with_equally_many_ranks_exchange_values_as_they_are() -> None:
    plan = make_plan(divisible("llama"), pp=2)
    assert Reshaped.between(plan, 0, 1, replica=0, tensor=TensorRanks()) is None
