"""Law: a loss in chunks, and its gradients, are those of all logits, whatever the chunks."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_plans import tiny
from torch import nn

from weft.describe.layer_choices import Value
from weft.describe.loss_choice import BY_SIZE
from weft.errors import InputError
from weft.methods.loss_kernels.runtime import run_chunked
from weft.methods.loss_kernels.runtime.chunked import ChunkedLogits
from weft.methods.loss_kernels.runtime.fused import FusedLogits
from weft.run.parallel.loss_input import loss_input
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.stage.build import build_stage
from weft.training.tasks.base import cross_entropy, most_likely
from weft.training.tasks.text import CausalLanguageModelling

IGNORED = -100
WIDTH, VOCABULARY = 6, 11
# Relative to the largest gradient.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
Given = tuple[torch.Tensor, nn.Parameter, nn.Parameter | None, torch.Tensor]


def drawn(tokens: int, dtype: torch.dtype, *, bias: bool, seed: int) -> Given:
    """Vectors, weight, bias and targets, some of them ignored, but never all."""
    generator = torch.Generator().manual_seed(seed)

    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))

    targets = torch.randint(VOCABULARY, (1, tokens), generator=generator)
    targets[0, 1:][torch.rand(tokens - 1, generator=generator) < 0.3] = IGNORED
    hidden = torch.randn(1, tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    return hidden, parameter(VOCABULARY, WIDTH), parameter(VOCABULARY) if bias else None, targets


def unmade(
    hidden: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, chunks: Value
) -> ChunkedLogits:
    return ChunkedLogits(hidden, weight, bias, VOCABULARY, TensorRanks(), chunks=chunks)


def gradients(loss: torch.Tensor, *of: torch.Tensor | None) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [one for one in of if one is not None]))


@given(
    tokens=st.integers(1, 23),
    chunks=st.one_of(st.integers(1, 25), st.just(BY_SIZE)),
    dtype=st.sampled_from(list(TOLERANCES)),
    bias=st.booleans(),
    factor=st.sampled_from([1.0, 0.25, 1024.0]),
    seed=st.integers(0, 1000),
)
def test_chunks_give_the_loss_and_gradients_of_all_logits(
    tokens: int, chunks: Value, dtype: torch.dtype, bias: bool, factor: float, seed: int
) -> None:
    *given_tensors, targets = drawn(tokens, dtype, bias=bias, seed=seed)
    hidden, weight, added = given_tensors
    logits = nn.functional.linear(hidden, weight, added)
    expected = factor * cross_entropy(logits, targets, IGNORED)
    found = factor * cross_entropy(unmade(hidden, weight, added, chunks), targets, IGNORED)
    tolerance = TOLERANCES[dtype]
    assert found.dtype == expected.dtype
    assert found.item() == pytest.approx(expected.item(), rel=tolerance)
    ours, theirs = gradients(found, *given_tensors), gradients(expected, *given_tensors)
    largest = max(one.abs().max().item() for one in theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == other.dtype
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance * largest)


@given(tokens=st.integers(1, 23), chunks=st.integers(1, 25), seed=st.integers(0, 1000))
def test_chunks_find_the_class_of_the_largest_logit(tokens: int, chunks: int, seed: int) -> None:
    hidden, weight, bias, _ = drawn(tokens, torch.float64, bias=True, seed=seed)
    found = most_likely(unmade(hidden, weight, bias, chunks).detach())
    assert torch.equal(found, nn.functional.linear(hidden, weight, bias).argmax(-1))


def test_the_gradient_of_a_weight_in_16_bits_is_added_up_in_fp32() -> None:
    """A sum of many chunks in 16 bits would lose what is small beside it."""
    tokens = 4096
    hidden = torch.ones(1, tokens, WIDTH, dtype=torch.bfloat16)
    weight = nn.Parameter(torch.zeros(VOCABULARY, WIDTH, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    loss = unmade(hidden, weight, None, 1).total_cross_entropy(torch.zeros(1, tokens, dtype=torch.long))
    loss.backward()
    assert weight.grad is not None
    each = torch.tensor(1.0 / VOCABULARY).bfloat16().item()
    assert weight.grad[1, 0].item() == pytest.approx(tokens * each, rel=1e-6)


def like_liger(
    vectors: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """What the fused kernel computes, by the words of its function."""
    assert options.pop("accum_dtype") == torch.float32
    return nn.functional.cross_entropy(nn.functional.linear(vectors, weight, bias), target, **options)


@given(tokens=st.integers(1, 9), bias=st.booleans(), seed=st.integers(0, 100))
def test_the_fused_kernel_is_given_the_head_and_all_targets(tokens: int, bias: bool, seed: int) -> None:
    hidden, weight, added, targets = drawn(tokens, torch.float64, bias=bias, seed=seed)
    package = ModuleType("liger_kernel.transformers.functional")
    package.liger_fused_linear_cross_entropy = like_liger  # type: ignore[attr-defined]
    unfused = nn.functional.linear(hidden, weight, added)
    with mock.patch.dict(sys.modules, {package.__name__: package}):
        found = FusedLogits(hidden, weight, added, VOCABULARY, TensorRanks())
        loss = cross_entropy(found, targets, IGNORED)
    assert loss.item() == pytest.approx(cross_entropy(unfused, targets, IGNORED).item(), rel=1e-12)
    assert torch.equal(most_likely(found.detach()), unfused.argmax(-1))


def test_an_evaluation_makes_no_gradients() -> None:
    hidden, weight, bias, targets = drawn(5, torch.float32, bias=True, seed=0)
    with torch.no_grad():
        loss = unmade(hidden, weight, bias, 2).total_cross_entropy(targets)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(
        unmade(hidden, weight, bias, 3).total_cross_entropy(targets).item(), rel=1e-6
    )


def test_a_loss_that_needs_all_logits_is_refused() -> None:
    stage = build_stage(tiny(), range(8), 0, torch.float32)
    run_chunked(stage, 7, 4)
    assert callable(loss_input(stage, CausalLanguageModelling))
    with pytest.raises(
        InputError, match=r"plan\.loss: the loss function needs all logits.*nearest valid: whole"
    ):
        loss_input(stage, nn.CrossEntropyLoss())


def test_a_stage_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match=r"plan\.loss: only heads over a vocabulary"):
        run_chunked(nn.Linear(2, 2), 0, 4)
