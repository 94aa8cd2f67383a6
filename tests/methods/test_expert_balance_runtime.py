"""Laws of a balance's losses: they are those of the equations, whatever the cut into passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from decoder_models import tiny_decoder
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.amount import Shape
from weft.describe.decoder import Experts, Scores
from weft.describe.layer import Layer
from weft.methods.expert_balance.costs import with_loss
from weft.methods.expert_balance.runtime.census import Census, shares_of
from weft.methods.expert_balance.runtime.losses import (
    Routed,
    loss_of_groups,
    reaching,
    rows_of_scores,
    scores_of,
    totals,
)
from weft.methods.expert_balance.runtime.routers import RouterWatch
from weft.run.parallel.token_ranks import TokenRanks
from weft.run.stage.build import build_stage

IGNORED = -100
CASES = {
    "samples": st.integers(1, 4),
    "tokens": st.integers(1, 5),
    "experts": st.integers(2, 6),
    "choices": st.integers(1, 2),
    "scores": st.sampled_from(["softmax", "sigmoid"]),
    "seed": st.integers(0, 1000),
}


def routed(samples: int, tokens: int, experts: int, choices: int, seed: int) -> tuple[Routed, torch.Tensor]:
    """Decisions about samples one after the other, and which of their tokens count."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(samples * tokens, experts, generator=generator, dtype=torch.float64)
    valid = torch.rand(samples, tokens, generator=generator) < 0.7
    return Routed(logits.requires_grad_(), logits.topk(choices).indices), valid


def part(whole: Routed, valid: torch.Tensor, sample: int) -> tuple[Routed, torch.Tensor]:
    tokens = valid.shape[1]
    rows = slice(sample * tokens, (sample + 1) * tokens)
    return Routed(whole.logits[rows], whole.chosen[rows]), valid[sample : sample + 1]


def by_the_equation(whole: Routed, valid: torch.Tensor, scores: Scores) -> torch.Tensor:
    """E times the sum of f(i) P(i), from the tokens one by one."""
    kept = valid.flatten()
    probabilities = scores_of(whole.logits, scores)[kept]
    experts, chosen = whole.logits.shape[1], whole.chosen[kept]
    shares = [(chosen == one).double().mean() for one in range(experts)]
    return experts * sum(share * probabilities[:, one].mean() for one, share in enumerate(shares))


@given(**CASES)
def test_the_gradient_of_any_cut_is_that_of_the_whole(
    samples: int, tokens: int, experts: int, choices: int, scores: Scores, seed: int
) -> None:
    whole, valid = routed(samples, tokens, experts, choices, seed)
    passes = [totals(*part(whole, valid, one), 1, scores) for one in range(samples)]
    counts = sum(one.counts for one in passes)[0]
    assert counts.sum() == choices * valid.sum()
    row, square = rows_of_scores(counts, counts, choices, 0.3, 0.1)
    late = sum((one.scores[0] * row).sum() + one.squares[0] * square for one in passes)
    [found] = torch.autograd.grad(late, whole.logits)
    if not valid.any():
        assert not found.any()
        return
    squares = whole.logits.logsumexp(-1)[valid.flatten()].square().mean()
    expected_loss = 0.3 * by_the_equation(whole, valid, scores) + 0.1 * squares
    [expected] = torch.autograd.grad(expected_loss, whole.logits)
    assert late.item() == pytest.approx(expected_loss.item(), rel=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@given(**CASES)
def test_groups_are_balanced_one_by_one(
    samples: int, tokens: int, experts: int, choices: int, scores: Scores, seed: int
) -> None:
    whole, valid = routed(samples, tokens, experts, choices, seed)
    found = loss_of_groups(totals(whole, valid, samples, scores), choices, 0.3, 0.1, TokenRanks())
    expected = 0.0
    for one in range(samples):
        own, counting = part(whole, valid, one)
        if counting.any():
            squares = own.logits.logsumexp(-1)[counting.flatten()].square().mean()
            expected += (0.3 * by_the_equation(own, counting, scores) + 0.1 * squares).item()
    assert found.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert found.isfinite()


@given(**CASES)
def test_a_loss_is_bounded_and_above_one_where_choices_follow_scores(
    samples: int, tokens: int, experts: int, choices: int, scores: Scores, seed: int
) -> None:
    whole, _ = routed(samples, tokens, experts, choices, seed)
    all_count = torch.ones(samples, tokens)
    loss = by_the_equation(whole, all_count.bool(), scores).item()
    assert 0.0 <= loss <= experts / choices + 1e-9
    found = totals(whole, all_count, 1, scores)
    shares, means = found.counts[0], found.scores[0]
    if torch.equal(shares.argsort(stable=True), means.argsort(stable=True)):
        assert loss >= 1.0 - 1e-9


@given(
    rows=st.lists(st.lists(st.sampled_from([IGNORED, 3]), min_size=4, max_size=4), min_size=1, max_size=3),
    more=st.integers(0, 2),
)
def test_tokens_behind_the_last_target_do_not_count(rows: list[list[int]], more: int) -> None:
    found = reaching(torch.tensor([[*row, *[7] * more] for row in rows]), 4, IGNORED)
    for row, own in zip(rows, found.tolist(), strict=True):
        last = max((at for at, target in enumerate(row) if target != IGNORED), default=-1)
        assert own == [int(at <= last) for at in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("squares", [False, True])
def test_a_pass_keeps_as_many_bytes_as_layers_say(dtype: torch.dtype, squares: bool) -> None:
    tokens, experts = 256, 64
    logits = torch.randn(tokens, experts, dtype=dtype).requires_grad_()
    saved: dict[int, int] = {}

    def pack(one: torch.Tensor) -> torch.Tensor:
        saved[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    decided = Routed(logits, logits.topk(2).indices)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        found = totals(decided, torch.ones(1, tokens), 1, "softmax", squares=squares)
    assert found.scores.requires_grad
    block, shape = Layer(name="block.0", kind="block"), Shape(1, tokens)
    before, after = (one.kept_bytes(shape) for one in (block, with_loss(block, experts, squares=squares)))
    # Some vectors of the tokens come on top.
    assert after - before <= sum(saved.values()) <= (after - before) * 1.1


@given(**CASES)
def test_a_census_has_shares_of_tokens_and_the_scores_of_their_experts(
    samples: int, tokens: int, experts: int, choices: int, scores: Scores, seed: int
) -> None:
    sizes = Experts(count=experts, active=choices, width=1, scores=scores)
    census = Census([3, 7], sizes, torch.device("cpu"), sequence=tokens)
    passes = [routed(samples, tokens, experts, choices, one)[0] for one in (seed, seed + 1)]
    with torch.no_grad():
        for one in passes:
            census.see(7, TokenRanks(), one)
    empty, found = shares_of(census.sums.numpy())
    chosen = torch.cat([one.chosen for one in passes])
    rates = [(chosen == one).any(1).double().mean().item() for one in range(experts)]
    assert found["rates"] == pytest.approx(rates, abs=1e-12)
    assert sum(found["rates"]) == pytest.approx(choices)
    own = torch.cat([scores_of(one.logits, scores) for one in passes]).gather(1, chosen)
    assert found["chosen_scores"] == pytest.approx(own.sum(1).mean().item(), rel=1e-9)
    nothing = dict.fromkeys(("chosen_scores", "balance", "balance_of_samples", "slack"), 0.0)
    assert empty == {"rates": [0.0] * experts, "scores": [0.0] * experts, **nothing}


def seen(
    sizes: Experts, passes: Sequence[Routed], tokens: int, ranks: TokenRanks | None = None
) -> npt.NDArray[np.float64]:
    """The sums of a census of one layer."""
    census = Census([0], sizes, torch.device("cpu"), sequence=tokens)
    with torch.no_grad():
        for one in passes:
            census.see(0, ranks or TokenRanks(), one)
    found: npt.NDArray[np.float64] = census.sums.numpy()
    return found


@given(**CASES)
def test_the_slack_is_the_covariance_of_shares_and_scores_over_samples(
    samples: int, tokens: int, experts: int, choices: int, scores: Scores, seed: int
) -> None:
    """E times the sum of Cov(f, P) over samples; however samples are divided into passes."""
    sizes = Experts(count=experts, active=choices, width=1, scores=scores)
    passes = [routed(samples, tokens, experts, choices, one)[0] for one in (seed, seed + 1)]
    alone = [
        Routed(one.logits[at : at + tokens], one.chosen[at : at + tokens])
        for one in passes
        for at in range(0, samples * tokens, tokens)
    ]
    f = np.array([np.bincount(one.chosen.flatten(), minlength=experts) / (choices * tokens) for one in alone])
    p = np.array([scores_of(one.logits.detach(), scores).mean(0).numpy() for one in alone])
    covariance = ((f - f.mean(0)) * (p - p.mean(0))).mean(0)
    for cut in (passes, alone):
        [found] = shares_of(seen(sizes, cut, tokens))
        assert found["slack"] == pytest.approx(experts * covariance.sum(), rel=1e-9, abs=1e-12)
        assert found["balance_of_samples"] == pytest.approx(experts * (f * p).sum(1).mean(), rel=1e-9)
        assert found["balance"] == pytest.approx(experts * (f.mean(0) * p.mean(0)).sum(), rel=1e-9)
    [same] = shares_of(seen(sizes, [alone[0]] * 3, tokens))
    assert same["slack"] == pytest.approx(0.0, abs=1e-12)


class _Halves(TokenRanks):
    """Two ranks, one after the other, of which each has a half of every sample's tokens."""

    size = 2

    def __init__(self, both: torch.Tensor) -> None:
        self._both = both

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        assert any(torch.equal(own, one) for one in self._both)
        return self._both


@given(**CASES)
def test_ranks_with_parts_of_samples_have_the_slack_of_whole_ones(
    samples: int, tokens: int, experts: int, choices: int, scores: Scores, seed: int
) -> None:
    sizes = Experts(count=experts, active=choices, width=1, scores=scores)
    whole, _ = routed(samples, 2 * tokens, experts, choices, seed)
    halves = [
        Routed(*(one.unflatten(0, (samples, 2, -1))[:, half].flatten(0, 1) for one in whole))
        for half in (0, 1)
    ]
    own = [totals(one, torch.ones(samples, tokens), samples, scores, squares=False) for one in halves]
    ranks = _Halves(torch.stack([torch.cat([one.counts, one.scores], 1).detach() for one in own]))
    sums = [seen(sizes, [one], 2 * tokens, ranks) for one in halves]
    np.testing.assert_allclose(sum(sums), seen(sizes, [whole], 2 * tokens), rtol=1e-9, atol=1e-12)


def test_a_watch_tells_evaluations_apart_from_training() -> None:
    class Router(torch.nn.Module):
        def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            weights, chosen = logits.topk(1)
            return logits, weights, chosen

    router = Router()
    watch, seen = RouterWatch(router), list[Routed]()
    watch.evaluated = seen.append
    logits = torch.tensor([[1.0, 2.0]])
    router(logits)
    assert watch.take().chosen.tolist() == [[1]]
    assert seen == []
    with torch.no_grad():
        router(-logits)
    assert [one.chosen.tolist() for one in seen] == [[[0]]]


def test_frozen_routers_keep_their_biases() -> None:
    config = tiny_decoder("glm4_moe", num_hidden_layers=2, first_k_dense_replace=1)
    stage = build_stage(config, range(config.layers + 2), 0, torch.float32)
    [(layer, bias)] = stage.choice_biases().items()
    assert layer == 2
    assert bias is stage.routers()[layer].e_score_correction_bias
    stage.routers()[layer].requires_grad_(False)
    assert stage.choice_biases() == {}


def test_half_precision_is_counted_in_fp32() -> None:
    """A sum of many tokens in 16 bits would lose counts."""
    tokens: Any = torch.zeros(5000, 2, dtype=torch.bfloat16)
    found = totals(Routed(tokens, torch.zeros(5000, 1, dtype=torch.long)), torch.ones(1, 5000), 1, "softmax")
    assert found.counts.tolist() == [[5000.0, 0.0]]
    assert found.scores.dtype == torch.float32
