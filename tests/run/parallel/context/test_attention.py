"""Law: whatever the kernel, a chunk of queries sees the keys up to its own and no others."""

from __future__ import annotations

import pytest
import torch

from weft.run.parallel.context.attention import ContextAttention
from weft.run.parallel.context.ranks import ContextRanks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_token_is_on_one_rank_and_comes_back_to_its_place(ranks: int) -> None:
    tokens = torch.arange(2 * 12).view(2, 12)
    shares = torch.stack([ContextRanks(place, ranks).own_tokens(tokens) for place in range(ranks)])
    if ranks > 1:
        assert torch.equal(ContextRanks(0, ranks).joined(shares), tokens)
    else:
        assert shares[0] is not tokens or torch.equal(shares[0], tokens)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_the_same_work(ranks: int) -> None:
    """Pairs of a query and a key that it sees, of every rank."""
    positions = torch.arange(12 * ranks).unsqueeze(0)
    own = [ContextRanks(place, ranks).own_tokens(positions) for place in range(ranks)]
    assert len({int((one + 1).sum()) for one in own}) == 1


@pytest.mark.parametrize("chunk", range(4))
def test_masks_of_all_devices_are_equal(chunk: int) -> None:
    attention = ContextAttention(ContextRanks(0, 2))
    queries, keys = 3, 3 * (chunk + 1)
    on_host = attention._lower_right(queries, keys, torch.empty(0))
    elsewhere = attention._lower_right(queries, keys, torch.empty(0, device="meta"))
    assert torch.equal(on_host == 0.0, elsewhere._materialize())
    assert torch.equal(on_host.isneginf(), ~elsewhere._materialize())
