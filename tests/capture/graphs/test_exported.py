"""What cannot be captured is refused in one line, with the file and the line of the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from weft.capture.graphs.captured import CapturedModel
from weft.errors import InputError

HERE = Path(__file__).name


class One(nn.Module):
    """A linear layer, and what a function makes of its result."""

    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.register_buffer("count", torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> object:
        return self.function(self.linear(inputs))


def by_values(value: torch.Tensor) -> torch.Tensor:
    if value.sum() > 0:
        return value
    return -value


def of_fixed_batch(value: torch.Tensor) -> torch.Tensor:
    return value.view(2, 4) + 1


def of_a_mean(value: torch.Tensor) -> torch.Tensor:
    return value - value.mean(0)


def of_frequencies(value: torch.Tensor) -> torch.Tensor:
    return torch.fft.rfft(value).abs()


def of_nothing(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros(value.shape[0], 4)


# The place is that of the operator's error, or the line of `forward` that leads to the operator.
FORWARD = One.forward.__code__.co_firstlineno + 1
CASES = {
    by_values: (
        "its control flow or sizes depend on values of tensors",
        by_values.__code__.co_firstlineno + 1,
    ),
    of_fixed_batch: ("its code fixes the batch to 2 samples; take it from an input's size", FORWARD - 1),
    of_a_mean: ("mean mixes the samples of a batch", FORWARD),
    of_frequencies: ("operator aten::_fft_r2c has no known cost", FORWARD),
    of_nothing: ("no trained parameter changes the result", None),
}


@pytest.mark.parametrize("function", CASES)
def test_it_is_refused_with_its_place(function, capfd: pytest.CaptureFixture[str]) -> None:
    message, line = CASES[function]
    with pytest.raises(InputError) as refused:
        CapturedModel(One(function), torch.zeros(1, 4))
    [violation] = refused.value.violations
    assert message + (f" ({HERE}, line {line})" if line else "") in str(violation)
    assert capfd.readouterr() == ("", "")


def refused(module: nn.Module, example: object) -> str:
    with pytest.raises(InputError) as error:
        CapturedModel(module, example)
    [violation] = error.value.violations
    return str(violation)


class Counting(One):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count.add_(1.0)
        return self.linear(inputs) + self.count


def test_state_that_changes_is_named() -> None:
    assert "the module changes count while it runs (test_exported.py, line" in refused(
        Counting(of_a_mean), torch.zeros(1, 4)
    )
    normed = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert "(nearest valid: a batch norm in eval())" in refused(normed, torch.zeros(2, 4))
    assert CapturedModel(normed.eval(), torch.zeros(2, 4)).layer_graph().parameters() == 28


def test_several_results_and_examples_without_samples_are_refused() -> None:
    two = f"the module returns 2 tensors; one is needed, for the loss ({HERE}, line {FORWARD - 1})"
    assert two in refused(One(lambda value: (value, value)), torch.zeros(1, 4))
    for example in (torch.tensor(1.0), (), "text"):
        assert "each with the samples on its first axis" in refused(nn.Linear(4, 4), example)
    assert "the example has 0 samples" in refused(nn.Linear(4, 4), torch.zeros(0, 4))


class Behind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


def test_frozen_weights_before_all_trained_ones_are_refused() -> None:
    assert "linear has frozen weights and nothing before it is trained" in refused(
        Behind(), torch.zeros(1, 4)
    )


def test_arguments_have_names_and_models_of_transformers_one_result() -> None:
    from captured_models import hugging_face

    module, tokens = hugging_face("BertForMaskedLM")
    example = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    graph = CapturedModel(module, example).layer_graph()
    assert graph.inputs == ((0, 0), (1, 1), (1, 2))
    assert graph.vocabulary == 50
    assert graph.sequence == 6
