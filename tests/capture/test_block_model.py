"""A model of one's own: costs are those of its arithmetic; what cannot run is refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import own_models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_models import SEQUENCE, VOCABULARY, WIDTH
from saved_bytes import saved_by_autograd
from torch import nn

from weft.capture.block_model import BlockModel
from weft.capture.graphs.captured import CapturedModel
from weft.capture.layers import profile_layers
from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.models import resolve_model
from weft.errors import InputError


@pytest.mark.parametrize("build", [own_models.images, own_models.text])
def test_parameters_shapes_and_chain_are_those_of_the_modules(build) -> None:
    model = build()
    graph = model.layer_graph()
    assert graph.is_chain
    example = torch.zeros(2, *model.sample_shapes[0])
    value = example if build is own_models.images else example.long()
    for index, layer in enumerate(graph.layers):
        module = model.layer(index)
        value = module(value)
        assert tuple(value.shape[1:]) == model.sample_shapes[index + 1]
        assert layer.parameters(Shape(1, 1)) == sum(p.numel() for p in module.parameters())
        assert layer.sent(Shape(2, 1)) == value.numel()
    assert LayerGraph.from_json(graph.to_json()) == graph


@given(size=st.integers(1, 9))
def test_products_are_counted_per_sample(size: int) -> None:
    shape = Shape(size, 1)
    stem, block, _, head = (layer.forward.flops(shape) for layer in own_models.images().layer_graph().layers)
    assert stem == size * 2 * 64 * 9 * WIDTH
    assert block == size * 2 * 64 * 9 * WIDTH * WIDTH
    assert head == size * 2 * WIDTH * 64 * 10
    table, _, last = (layer.forward.flops(shape) for layer in own_models.text().layer_graph().layers)
    assert table == 0
    assert last == size * 2 * SEQUENCE * WIDTH * VOCABULARY


def test_linear_layers_are_the_plain_trained_ones_that_are_called_once() -> None:
    model = own_models.mixed()
    assert model.linears(0) == ()
    # Those of one tensor stand together, in the order of their calls; rows are those of one sample.
    expected = [
        ("keys", 0, WIDTH, 4, SEQUENCE),
        ("queries", 0, WIDTH, 4, SEQUENCE),
        ("tokens", 1, SEQUENCE, SEQUENCE, WIDTH),
    ]
    assert [tuple(one) for one in model.linears(1)] == expected
    assert [tuple(one) for one in model.linears(3)] == [("", 0, WIDTH, VOCABULARY, SEQUENCE)]


class Shared(nn.Module):
    """Two linear layers of one weight, one with normed weights, and one whose output is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.cut = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            cut = self.cut(inputs)
        return self.normed(self.one(inputs) + self.other(inputs)) + cut


def test_linear_layers_with_shared_or_made_weights_or_without_gradients_are_left_out() -> None:
    assert BlockModel([Shared], example=torch.zeros(1, 4), classes=4).linears(0) == ()


class Frozen(nn.Module):
    """A frozen linear layer, and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(inputs))


def test_frozen_parameters_are_counted_apart_from_trained_ones() -> None:
    layers = [partial(nn.Linear, 4, 4), Frozen]
    modules = nn.Sequential(*(make() for make in layers))
    built = BlockModel(layers, example=torch.zeros(1, 4), classes=4).layer_graph()
    captured = CapturedModel(modules, torch.zeros(1, 4), classes=4).layer_graph()
    shape = Shape(1, 1)
    for graph in (built, captured):
        assert graph.trained_parameters() == 4 * 4 + 4 + 4 * 4
        assert sum(layer.frozen(shape) for layer in graph.layers) == 4 * 4 + 4
    assert not BlockModel(layers[:1], example=torch.zeros(1, 4), classes=4).layer_graph().has_frozen_layers


class Attention(nn.Module):
    """One head without a scale; products of values alone."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.softmax(inputs @ inputs.transpose(1, 2), -1) @ inputs


def test_products_of_values_have_no_weight_part() -> None:
    model = BlockModel([lambda: nn.Linear(4, 4), Attention], example=torch.zeros(1, 7, 4), classes=4)
    dense, attention = model.layer_graph().layers
    for size in (1, 3):
        shape = Shape(size, 1)
        assert attention.forward.flops(shape) == size * 2 * 2 * 7 * 7 * 4
        assert attention.backward_weight.flops(shape) == 0
        assert attention.flops(shape) == 3 * attention.forward.flops(shape)
        assert dense.backward_weight.flops(shape) == dense.forward.flops(shape) == size * 2 * 7 * 4 * 4


@pytest.mark.parametrize("index", [1, 3])
def test_a_layer_keeps_what_autograd_saves(index: int) -> None:
    model = own_models.images()
    module = model.layer(index)
    inputs = torch.randn(3, *model.sample_shapes[index], requires_grad=True)
    saved = saved_by_autograd(lambda: module(inputs), module.parameters())
    predicted = 4 * model.layer_graph().layers[index].kept(Shape(3, 1))
    assert saved == pytest.approx(predicted, rel=0.02)


def test_a_run_file_names_it() -> None:
    config = resolve_model("own_models:images")
    assert (config.vocabulary, config.image_size, config.channels) == (10, 8, 1)
    graph = layer_graph(config)
    assert graph.name == "own_models:images"
    assert graph.fingerprint == layer_graph(config).fingerprint
    words = resolve_model("own_models:text", sequence=SEQUENCE)
    assert (words.vocabulary, words.sequence, words.reads_images) == (VOCABULARY, SEQUENCE, False)


def refused(name: str, **options: int) -> str:
    with pytest.raises(InputError) as error:
        resolve_model(name, **options)
    [violation] = error.value.violations
    return str(violation)


def test_what_is_no_model_is_refused_in_one_line() -> None:
    assert "'absent:build' cannot be imported: No module named 'absent'" in refused("absent:build")
    assert "cannot be imported" in refused("own_models:absent")
    assert "'own_models:NOT_A_FUNCTION' is no function" in refused("own_models:NOT_A_FUNCTION")
    assert "returned int, which is no model" in refused("own_models:nothing")
    assert "4 layers and 4 sample_shapes" in refused("own_models:Shapeless")
    assert "9 tokens, but own_models:text is made for samples of 5" in refused("own_models:text", sequence=9)


class Broken(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing\nat all")


class Shifted(nn.Module):
    """Has a buffer that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.shift


class Counting(Shifted):
    """Changes its buffer."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.shift.add_(1)
        return super().forward(inputs)


MADE = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Broken, r"layer 1 cannot be run: ValueError: no such thing \(test_block_model.py, line \d+\)$"),
        (lambda: nn.Linear(5, 5), "layer 1 cannot be run: RuntimeError"),
        (lambda: nn.Flatten(0), "layer 1 cannot be run: TypeError: its output is no tensor of 1 sample"),
        (Counting, "layer 1 changes its state while it runs: shift$"),
        (lambda: 3, "layer 1 cannot be run: TypeError: its function returns int, no module$"),
        (lambda: MADE, "its function must make a new module"),
        (nn.Linear(4, 4), "layer 1 is Linear, no function that makes a module$"),
        (3, "layer 1 is int, no function that makes a module$"),
    ],
)
def test_a_layer_that_cannot_run_is_named(layer, message: str) -> None:
    with pytest.raises(InputError, match=message):
        BlockModel([lambda: nn.Linear(4, 4), layer], example=torch.zeros(1, 4), classes=4)


def test_state_that_does_not_change_is_allowed() -> None:
    model = BlockModel([lambda: nn.Linear(4, 4), Shifted], example=torch.zeros(1, 4), classes=4)
    assert model.sample_shapes == ((4,), (4,), (4,))


def test_buffers_may_come_from_data() -> None:
    class Scaled(Shifted):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.from_numpy(np.ones(4, dtype=np.float32)))

    assert BlockModel([Scaled], example=torch.zeros(1, 4), classes=4).sample_shapes == ((4,), (4,))


def test_costs_are_of_one_sample_of_the_example() -> None:
    one, eight = (
        BlockModel((lambda: nn.Linear(4, 4) for _ in range(2)), example=torch.zeros(count, 4), classes=4)
        for count in (1, 8)
    )
    assert one.layer_graph() == eight.layer_graph()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": nn.Sequential(nn.Linear(4, 4))}, "layers is Sequential; must be a list of functions"),
        ({"layers": 3}, "layers is int; must be a list of functions that make modules"),
        ({"example": None}, "the example must be a tensor or several"),
        ({"example": np.zeros((1, 4))}, "the example must be a tensor or several"),
        ({"classes": "4"}, "classes = '4': must be a positive integer"),
        ({"classes": 0}, "classes = 0: must be a positive integer"),
        ({"sequence": -1}, "sequence = -1: must be a positive integer"),
        ({"edges": [0]}, "edges: 0: must be a pair of integers"),
        ({"edges": [(0, 1, 2)]}, "edges: (0, 1, 2): must be a pair of integers"),
        ({"inputs": ["ab"]}, "inputs: 'ab': must be a pair of integers"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(changed: dict[str, object], message: str) -> None:
    given = {"layers": [lambda: nn.Linear(4, 4)] * 2, "example": torch.zeros(1, 4), "classes": 4, **changed}
    with pytest.raises(InputError) as caught:
        BlockModel(**given)
    assert str(caught.value).startswith(f"model.build: {message}")


def test_no_layers_are_no_model() -> None:
    with pytest.raises(InputError, match="0 layers"):
        BlockModel([], example=torch.zeros(1, 4), classes=4)


def test_layers_of_a_model_without_samples_are_not_measured() -> None:
    config = resolve_model("own_models:without_samples")
    with pytest.raises(InputError, match="has no samples to measure layers with"):
        profile_layers(
            config,
            layer_graph(config),
            "cpu",
            torch.device("cpu"),
            precision="fp32",
            micro_batch_sizes=(1,),
        )


def test_layers_that_form_a_graph_are_costed_on_what_they_read() -> None:
    model = own_models.diamond()
    graph = model.layer_graph()
    assert not graph.is_chain
    assert graph.feeders[5] == {0, 2, 4}
    assert model.sample_shapes[1:] == ((WIDTH, 8, 8),) * 5 + ((10,),)
    assert graph.layers[5].forward.flops(Shape(2, 1)) == 2 * 2 * 3 * WIDTH * 64 * 10
    assert LayerGraph.from_json(graph.to_json()) == graph


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([(0, 1), (1, 1)], "edge (1, 1) must go from a layer to a later one of 3"),
        ([(0, 1), (1, 3)], "edge (1, 3) must go from a layer to a later one of 3"),
        ([(0, 1), (0, 1), (1, 2)], "edge (0, 1) is there more than once"),
    ],
)
def test_edges_that_are_no_graph_are_refused(edges: list[tuple[int, int]], message: str) -> None:
    layers = [lambda: nn.Linear(4, 4)] * 3
    with pytest.raises(InputError) as caught:
        BlockModel(layers, edges=edges, example=torch.zeros(1, 4), classes=4)
    assert str(caught.value) == f"model.build: {message}"


def test_a_layer_that_nobody_reads_is_refused() -> None:
    with pytest.raises(
        InputError, match="no layer reads what layer 1 gives; only the last one gives the output"
    ):
        resolve_model("own_models:unread")


def test_layers_read_the_inputs_that_are_named() -> None:
    model = own_models.conditioned()
    graph = model.layer_graph()
    assert graph.inputs == ((0, 0), (1, 2))
    assert not graph.is_chain
    assert list(model.sample_shapes[:2]) == [(1, 8, 8), (3,)]
    assert len(model.sample_shapes) == 2 + len(graph.layers)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "the example has 2 inputs, and layers without a producer are .0.; name `inputs`"),
        ([(0, 0), (2, 2)], "input .2, 2. must lead from one of 2 inputs to one of 4 layers"),
        ([(0, 0)], "the example has 2 inputs"),
        ([(0, 2), (1, 2)], "layer 0 reads neither an input nor another layer"),
    ],
)
def test_inputs_that_nobody_reads_are_refused(inputs: list[tuple[int, int]] | None, message: str) -> None:
    layers = [own_models.stem, own_models.Residual, own_models.Conditioned, own_models.head]
    example = torch.zeros(1, 1, 8, 8), torch.zeros(1, 3)
    with pytest.raises(InputError, match=message):
        BlockModel(layers, example=example, inputs=inputs, classes=10)
