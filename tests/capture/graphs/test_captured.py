"""Laws of captured models, at every level: they compute what the module computes, and cost what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import own_models
import pytest
import torch
from captured_models import SMALL, TEXT, Captured, hugging_face, inception
from torch import nn

from weft.capture.graphs.captured import CapturedModel
from weft.capture.graphs.exported import ExportedModule, export_module
from weft.capture.graphs.levels import LEVELS
from weft.capture.layer_costs import storages_saved
from weft.describe.amount import Shape
from weft.describe.layer_graph import LayerGraph
from weft.errors import InputError

BATCH = 5
ONE = Shape(1, 1)
MODELS: dict[str, Callable[[], Captured]] = {
    "branches": own_models.branches,
    "tied": own_models.tied,
    "mlp": lambda: (
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
        torch.zeros(1, 4),
    ),
    **SMALL,
}
OTHERS: dict[str, Callable[[], Captured]] = {
    "published-inception": inception,
    "mixtral": lambda: hugging_face("MixtralForCausalLM", num_key_value_heads=1, num_local_experts=4, **TEXT),
}
# Of recurrent layers, weft counts the tensors of single steps. oneDNN's kernel keeps a workspace of its own.
# Positions and their rotations are counted in each layer that repeats them, up to this part of all.
MOST_REPEATED = {"llama": 0.1, "qwen2": 0.1, "tied": 0.25}


Example = torch.Tensor | tuple[torch.Tensor, ...]


def several(example: Example) -> tuple[torch.Tensor, ...]:
    return example if isinstance(example, tuple) else (example,)


def drawn(example: Example, dtype: torch.dtype, samples: int) -> list[torch.Tensor]:
    """Samples of which no two are alike."""
    torch.manual_seed(1)
    return [
        torch.randn(samples, *one.shape[1:], dtype=dtype)
        if one.is_floating_point()
        else torch.randint(7, (samples, *one.shape[1:]))
        for one in several(example)
    ]


def result_of(module: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    result = module(*inputs)
    return result if isinstance(result, torch.Tensor) else result.logits


def run(model: CapturedModel, modules: Sequence[nn.Module], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the layers give, each from what its edges say."""
    graph = model.layer_graph()
    values: list[torch.Tensor] = []
    for index, module in enumerate(modules):
        read = [inputs[number] for number in graph.inputs_read[index]]
        values.append(module(*read, *(values[one] for one in sorted(graph.feeders[index]))))
        assert values[-1].shape == (len(inputs[0]), *model.sample_shapes[graph.input_count + index])
    return values[-1]


def gradients(modules: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The sums of the gradients of each parameter in all layers, by its name in the whole module."""
    found: dict[str, torch.Tensor] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[name] = found.get(name, 0) + parameter.grad
    return found


@cache
def exported(name: str) -> tuple[nn.Module, Example, ExportedModule]:
    torch.manual_seed(0)
    module, example = {**MODELS, **OTHERS}[name]()
    return module, example, export_module(module, example)


@cache
def made(name: str, level: str) -> tuple[nn.Module, CapturedModel, Example]:
    """The module, its layers and its example; all levels share an export, which takes most of the time."""
    module, example, graph = exported(name)
    with patch("weft.capture.graphs.captured.export_module", return_value=graph):
        return module, CapturedModel(module, example, level=level), example


def on_one_runner(name: str, *more: str) -> Any:
    """A parameter of a test; those of one model share what is captured."""
    return pytest.param(name, *more, marks=pytest.mark.xdist_group(f"captured {name}"))


EVERY = pytest.mark.parametrize(
    ("name", "level"), [on_one_runner(name, level) for name in MODELS for level in LEVELS]
)


@EVERY
def test_it_computes_what_the_module_computes(name: str, level: str) -> None:
    module, model, example = made(name, level)
    whole = deepcopy(module).double()
    inputs = drawn(example, torch.float64, BATCH)
    layers = [model.layer(index).double() for index in range(len(model.layer_graph().layers))]
    expected, found = result_of(whole, inputs), run(model, layers, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    expected.sin().sum().backward()
    found.sin().sum().backward()
    sums = gradients(layers)
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(sums.pop(name), parameter.grad, rtol=1e-9, atol=1e-12)
    assert all(not one.any() for one in sums.values())


@EVERY
def test_its_graph_has_one_end_all_parameters_and_survives_a_file(name: str, level: str) -> None:
    module, model, _ = made(name, level)
    graph = model.layer_graph()
    assert graph.parameters() == sum(one.numel() for one in module.parameters())
    assert all(producer < consumer for producer, consumer in graph.edges)
    assert {producer for producer, _ in graph.edges} == set(range(len(graph.layers) - 1))
    assert LayerGraph.from_json(graph.to_json()) == graph
    # A profile finds measured times by kinds.
    assert len({one.kind for one in graph.layers}) == len({replace(one, name="") for one in graph.layers})


@EVERY
def test_it_keeps_what_autograd_saves_of_the_module(name: str, level: str) -> None:
    module, model, example = made(name, level)
    inputs = drawn(example, torch.float32, 1)
    with torch.backends.mkldnn.flags(enabled=False), storages_saved(module.parameters()) as saved:
        result_of(module, inputs)
    expected = sum(one.nbytes for one in saved.values())
    found = sum(4 * one.kept(ONE) + one.kept_bytes(ONE) for one in model.layer_graph().layers)
    assert expected <= 1.001 * found
    assert found <= (1.03 + MOST_REPEATED.get(name, 0.0)) * expected


@pytest.mark.parametrize("name", [on_one_runner(name) for name in MODELS])
def test_all_levels_have_the_same_products(name: str) -> None:
    graphs = [made(name, level)[1].layer_graph() for level in LEVELS]
    flops = [sum(layer.flops(ONE) for layer in graph.layers) for graph in graphs]
    # Rotations of positions have a product of their own, which each layer repeats.
    assert flops == pytest.approx(
        flops[:1] * len(LEVELS), rel=1e-9 if name not in ("llama", "qwen2") else 1e-2
    )
    assert len(graphs[0].layers) <= len(graphs[1].layers) <= len(graphs[2].layers)


def test_inception_has_the_published_layers_parameters_and_products() -> None:
    for level, layers in (("block", 19), ("operator", 218)):
        graph = made("published-inception", level)[1].layer_graph()
        assert len(graph.layers) == layers
        assert graph.parameters() == 23_834_568
        # 5.71 billion multiplications and additions.
        assert sum(one.forward.flops(ONE) for one in graph.layers) == pytest.approx(2 * 5.71e9, rel=2e-3)
    assert sum(one.kind.startswith("conv2d") for one in graph.layers) == 94


def test_a_mixture_with_grouped_products_is_captured() -> None:
    for level in LEVELS:
        module, model, example = made("mixtral", level)
        inputs = drawn(example, torch.float32, BATCH)
        graph = model.layer_graph()
        found = run(model, [model.layer(index) for index in range(len(graph.layers))], inputs)
        torch.testing.assert_close(found, module(*inputs).logits)
        # Two of four experts for each token, with three products each.
        experts = 2 * 2 * 6 * 3 * 2 * 16 * 32
        assert sum(one.forward.flops(ONE) for one in graph.layers) > experts


class Dropping(nn.Module):
    """Drops elements in a module, in a function and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(4, 8), nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        value = self.drop(self.first(inputs))
        value = nn.functional.scaled_dot_product_attention(value, value, value, dropout_p=0.5 * self.training)
        return self.last(nn.functional.dropout(value, 0.25, self.training))


def test_dropout_follows_the_mode_of_a_layer_and_is_seen_by_name() -> None:
    module = Dropping()
    model = CapturedModel(module, torch.zeros(1, 6, 4))
    layers = [model.layer(index) for index in range(len(model.layer_graph().layers))]
    named = [part.p for layer in layers for part in layer.modules() if "Dropout" in type(part).__name__]
    assert sorted(named) == [0.25, 0.5, 0.5]
    inputs = [torch.randn(BATCH, 6, 4)]
    assert not torch.equal(run(model, layers, inputs), run(model, layers, inputs))
    for layer in layers:
        layer.eval()
    torch.testing.assert_close(run(model, layers, inputs), module.eval()(*inputs))


class Cast(nn.Module):
    """Norms in fp32 whatever the precision, with a mask of the lowest number and new tensors of no type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        value = self.first(inputs)
        mask = torch.full((1, 4), torch.finfo(value.dtype).min, dtype=value.dtype, device=value.device)
        mask = mask * torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=value.dtype)
        wide = torch.softmax((value + mask).float(), -1)
        return self.last(wide.to(value.dtype) + torch.zeros(4, dtype=value.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_types_follow_the_precision_unless_the_code_fixes_them(dtype: torch.dtype, level: str) -> None:
    module = Cast()
    model = CapturedModel(module, torch.zeros(1, 4), level=level)
    layers = [model.layer(index).to(dtype) for index in range(len(model.layer_graph().layers))]
    inputs = [torch.randn(BATCH, 4, dtype=dtype)]
    found, expected = run(model, layers, inputs), module.to(dtype)(*inputs)
    assert found.dtype is dtype
    assert torch.equal(found, expected)


def test_a_module_without_values_is_planned_and_gives_no_layer() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model = CapturedModel(module, torch.zeros(1, 4))
    assert model.layer_graph().parameters() == 67
    with pytest.raises(InputError, match="is on the meta device and has no values"):
        model.layer(0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        heads = self.last.weight.sum() * inputs.unflatten(-1, (2, 4)).transpose(1, 2)
        value = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.last(value.transpose(1, 2).flatten(2))


def test_attention_counts_both_products() -> None:
    graph = CapturedModel(Attention(), torch.zeros(1, 6, 8), level="operator").layer_graph()
    layer = next(one for one in graph.layers if one.kind == "attention")
    assert layer.forward.flops(Shape(3, 1)) == 3 * 2 * 2 * (2 * 6 * 6 * 4)
    assert {one.kernel for one in layer.forward.matmuls} == {"flash2-causal"}


class Narrow(nn.Module):
    """Multiplies with a matrix in fp32, so that it runs in no other precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(inputs)) @ torch.eye(4, dtype=torch.float32))


def test_a_module_that_runs_in_one_precision_alone_is_captured_in_that_one() -> None:
    module = Narrow()
    model = CapturedModel(module, torch.zeros(1, 4), level="operator")
    layers = [model.layer(index) for index in range(len(model.layer_graph().layers))]
    inputs = [torch.randn(BATCH, 4)]
    torch.testing.assert_close(run(model, layers, inputs), module(*inputs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_module_and_its_example_may_have_another_precision(dtype: torch.dtype) -> None:
    usual = CapturedModel(nn.Linear(4, 4), torch.zeros(1, 4))
    other = CapturedModel(nn.Linear(4, 4).to(dtype), torch.zeros(1, 4, dtype=dtype))
    assert other.layer_graph() == usual.layer_graph()


@pytest.mark.parametrize(
    ("module", "example", "options", "message"),
    [
        (nn.Linear, torch.zeros(1, 4), {}, "torch.nn.modules.linear.Linear'>: must be a plain torch module"),
        (torch.jit.script(nn.Linear(4, 4)), torch.zeros(1, 4), {}, "must be a plain torch module"),
        (nn.Linear(4, 4), None, {}, "the example must be a tensor or several"),
        (nn.Linear(4, 4), torch.zeros(1, 4), {"classes": 0}, "classes = 0: must be a positive integer"),
        (nn.Linear(4, 4), torch.zeros(1, 4), {"sequence": "a"}, "sequence = 'a': must be a positive integer"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(module, example, options, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        CapturedModel(module, example, **options)
    assert len(str(refused.value).splitlines()) == 1
