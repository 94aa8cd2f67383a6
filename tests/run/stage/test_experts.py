"""Laws: experts compute what `transformers` computes, with and without ranks that divide them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_group import ThreadGroup, in_groups
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

from weft.run.parallel.expert_ranks import ExpertRanks
from weft.run.stage.experts import IMPLEMENTATION, Capacity, sort_rows

HIDDEN, COLUMNS = 8, 12
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def experts_of(count: int, implementation: str, dtype: torch.dtype = torch.float64) -> Any:
    config: Any = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=COLUMNS,
        num_local_experts=count,
        experts_implementation=implementation,
    )
    made = MixtralExperts(config)
    generator = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        nn.init.normal_(parameter, generator=generator)
    return made.to(dtype)


def routed(
    tokens: int, experts: int, choices: int, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, and experts and weights for them; some experts may get none."""
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    scores = torch.rand(tokens, experts, generator=generator) ** 8
    weights, chosen = scores.topk(choices, dim=-1)
    return stream.requires_grad_(), chosen, weights.detach().to(dtype).requires_grad_()


def gradients(
    experts: nn.Module, stream: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> list[torch.Tensor]:
    """The result, and the gradients of tokens, weights and experts for a sum of squares."""
    result = experts(stream, chosen, weights)
    found = torch.autograd.grad(result.pow(2).sum(), [stream, weights, *experts.parameters()])
    return [result.detach(), *found]


@given(tokens=st.integers(1, 12), experts=st.integers(1, 6), seed=st.integers(0, 99), data=st.data())
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_results_and_gradients_are_those_of_transformers(
    dtype: torch.dtype, tokens: int, experts: int, seed: int, data: st.DataObject
) -> None:
    choices = data.draw(st.integers(1, experts))
    inputs = routed(tokens, experts, choices, seed, dtype)
    ours = gradients(experts_of(experts, IMPLEMENTATION, dtype), *inputs)
    theirs = gradients(experts_of(experts, "eager", dtype), *inputs)
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype
        size = expected.abs().max().clamp(min=1.0)
        torch.testing.assert_close(found / size, expected / size, rtol=0, atol=TOLERANCES[dtype])


@given(tokens=st.integers(1, 20), experts=st.integers(1, 6), seed=st.integers(0, 99))
def test_rows_are_sorted_by_expert_and_then_by_token(tokens: int, experts: int, seed: int) -> None:
    _, chosen, _ = routed(tokens, experts, 1, seed)
    rows = sort_rows(chosen, experts)
    pairs = list(zip(chosen.flatten()[rows.order].tolist(), rows.order.tolist(), strict=True))
    assert pairs == sorted(pairs)
    assert torch.equal(rows.order[rows.place], torch.arange(len(rows.order)))
    assert rows.counts.tolist() == [int((chosen == expert).sum()) for expert in range(experts)]


def kept(chosen: torch.Tensor, tokens: int, most: int) -> torch.Tensor:
    """Which pairs keep their expert, one after the other."""
    keeps, taken = torch.zeros_like(chosen, dtype=torch.bool), dict[tuple[int, int], int]()
    for token, experts in enumerate(chosen.tolist()):
        for choice, expert in enumerate(experts):
            sample = token // tokens, expert
            taken[sample] = taken.get(sample, 0) + 1
            keeps[token, choice] = taken[sample] <= most
    return keeps


@given(
    tokens=st.integers(1, 6),
    samples=st.integers(1, 3),
    experts=st.integers(1, 6),
    most=st.integers(1, 6),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_full_experts_take_no_further_tokens_of_a_sample(
    tokens: int, samples: int, experts: int, most: int, seed: int, data: st.DataObject
) -> None:
    choices = data.draw(st.integers(1, experts))
    stream, chosen, weights = routed(tokens * samples, experts, choices, seed)
    keeps = kept(chosen, tokens, most)
    assert torch.equal(Capacity(most, tokens).keeps(chosen, experts), keeps)
    ours = experts_of(experts, IMPLEMENTATION)
    ours.capacity = Capacity(most, tokens)
    found = gradients(ours, stream, chosen, weights)
    # A choice that is lost counts as one with weight zero.
    expected = gradients(experts_of(experts, "eager"), stream, chosen, weights * keeps)
    expected[2] = expected[2] * keeps
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


@given(
    ranks=st.integers(2, 3),
    own=st.integers(1, 3),
    tokens=st.integers(1, 5),
    seed=st.integers(0, 99),
    most=st.none() | st.integers(1, 3),
)
def test_ranks_that_divide_experts_compute_what_one_computes(
    ranks: int, own: int, tokens: int, seed: int, most: int | None
) -> None:
    count = ranks * own
    stream, chosen, weights = routed(ranks * tokens, count, min(2, count), seed)
    alone = experts_of(count, IMPLEMENTATION)
    capacity = None if most is None else Capacity(most, tokens)
    alone.capacity = capacity
    expected, of_tokens, of_weights, *of_experts = gradients(alone, stream, chosen, weights)

    def on_rank(group: ThreadGroup) -> list[torch.Tensor]:
        experts = experts_of(count, IMPLEMENTATION)
        for name, parameter in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(parameter.detach().chunk(ranks)[group.place].clone()))
        experts.ranks, experts.capacity = ExpertRanks(group.place, ranks), capacity
        experts.ranks.connect(group)
        shares = (one.detach().chunk(ranks)[group.place] for one in (stream, chosen, weights))
        own_stream, own_chosen, own_weights = shares
        inputs = (own_stream.requires_grad_(), own_chosen, own_weights.requires_grad_())
        return gradients(experts, *inputs)

    found = [torch.cat(parts) for parts in zip(*in_groups(ranks, on_rank), strict=True)]
    for ours, theirs in zip(found, (expected, of_tokens, of_weights, *of_experts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
