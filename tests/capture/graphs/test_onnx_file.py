"""Layers of ONNX files have the products of the captured module; what has no cost or size is refused."""

from __future__ import annotations

import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from captured_models import SMALL
from torch import nn

from weft.capture.graphs.captured import CapturedModel
from weft.capture.graphs.levels import LEVELS
from weft.capture.graphs.onnx_file import read_onnx
from weft.describe.amount import Shape
from weft.describe.layer_graph import LayerGraph
from weft.errors import InputError

ONE = Shape(1, 1)


class Plain(nn.Module):
    """The logits of a model of `transformers`, or the result of another one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        result = self.module(*inputs)
        return result if isinstance(result, torch.Tensor) else result.logits


def drawn(module: nn.Module) -> nn.Module:
    """The module with values of which no two are equal: exporters join equal ones."""
    module = deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def written(
    module: nn.Module, example: torch.Tensor | tuple[torch.Tensor, ...], path: Path, **options: object
) -> Path:
    inputs = example if isinstance(example, tuple) else (example,)
    torch.onnx.export(
        Plain(drawn(module)).eval(), inputs, str(path), dynamo=False, do_constant_folding=False, **options
    )
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["inception", "gnmt", "transformer", "vit"])
def test_a_file_that_torch_wrote_has_the_products_and_parameters_of_the_module(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("onnx")
    module, example = SMALL[name]()
    path = written(module, example, tmp_path / "model.onnx", training=torch.onnx.TrainingMode.PRESERVE)
    expected = CapturedModel(module, example).layer_graph()
    for level in LEVELS:
        graph = read_onnx(path, level)
        # Exporters merge norms that rest into convolutions.
        assert graph.parameters() == expected.parameters() or name == "inception"
        assert sum(layer.flops(ONE) for layer in graph.layers) == sum(
            layer.flops(ONE) for layer in expected.layers
        )
        assert {producer for producer, _ in graph.edges} == set(range(len(graph.layers) - 1))
        assert (graph.vocabulary, graph.sequence) == (expected.vocabulary, expected.sequence)
        assert LayerGraph.from_json(graph.to_json()) == graph


@pytest.mark.filterwarnings("ignore")
def test_a_batch_of_several_or_of_no_size_costs_the_same_per_sample(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))
    names = {"input_names": ["images"], "dynamic_axes": {"images": {0: "batch"}}}
    graphs = [
        read_onnx(
            written(module, torch.zeros(batch, 1, 8, 8), tmp_path / "model.onnx", **options), "operator"
        )
        for batch, options in ((1, {}), (4, {}), (4, names))
    ]
    assert graphs[0].layers == graphs[1].layers == graphs[2].layers
    assert [layer.kind for layer in graphs[0].layers] == ["conv", "relu", "maxpool", "gemm"]
    # The convolution's and the pool's input, which is the rectifier's result, and the linear layer's.
    assert [4 * layer.kept(ONE) for layer in graphs[0].layers] == [4 * 64, 4 * 4 * 36, 0, 4 * 36]


def kept_with_weight_behind(path: Path, operator: str) -> float:
    """The elements that a product keeps of a sample of four, whose weight an operator gives."""
    onnx = pytest.importorskip("onnx")
    helper, floating = onnx.helper, onnx.TensorProto.FLOAT
    options = {"to": floating} if operator == "Cast" else {}
    nodes = [
        helper.make_node(operator, ["weight"], ["given"], **options),
        helper.make_node("MatMul", ["samples", "given"], ["result"], name="/first/MatMul"),
    ]
    ends = [helper.make_tensor_value_info(name, floating, ["batch", 4]) for name in ("samples", "result")]
    weight = helper.make_tensor("weight", floating, [4, 4], [0.5] * 16)
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), str(path))
    [layer] = read_onnx(path, "block").layers
    return layer.kept(ONE)


@pytest.mark.parametrize("operator", ["Identity", "Transpose", "Cast"])
def test_a_weight_behind_an_operator_is_no_kept_activation(operator: str, tmp_path: Path) -> None:
    assert kept_with_weight_behind(tmp_path / "model.onnx", operator) == 4


def model_of(path: Path, operator: str, *, axis: str | int = 4, domain: str = "") -> Path:
    onnx = pytest.importorskip("onnx")
    helper, floating = onnx.helper, onnx.TensorProto.FLOAT
    weight = helper.make_tensor("weight", floating, [4, 4], [0.5] * 16)
    nodes = [
        helper.make_node("MatMul", ["samples", "weight"], ["product"], name="/first/MatMul"),
        helper.make_node(operator, ["product"], ["result"], name=f"/last/{operator}", domain=domain),
    ]
    ends = [helper.make_tensor_value_info(name, floating, ["batch", axis]) for name in ("samples", "result")]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], [weight])
    versions = [helper.make_opsetid(*one) for one in (("", 17), ("own", 1))]
    onnx.save(helper.make_model(graph, opset_imports=versions), str(path))
    return path


def refused(path: Path) -> str:
    with pytest.raises(InputError) as error:
        read_onnx(path, "block")
    [violation] = error.value.violations
    return str(violation)


def test_operators_without_cost_and_axes_without_size_are_refused(tmp_path: Path) -> None:
    make = partial(model_of, tmp_path / "model.onnx")
    assert read_onnx(make("Relu"), "block").parameters() == 16
    assert "operator Det (/last/Det) has no known cost" in refused(make("Det"))
    assert "operator Own (/last/Own) has no known cost" in refused(make("Own", domain="own"))
    assert "input samples has an axis 'length' without a size; export it with one" in refused(
        make("Relu", axis="length")
    )
    (tmp_path / "text.onnx").write_text("no file of this kind")
    assert "no ONNX file: DecodeError" in refused(tmp_path / "text.onnx")
    assert "no ONNX file: FileNotFoundError" in refused(tmp_path / "absent.onnx")


def test_without_the_package_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr("weft.capture.graphs.onnx_file.find_spec", lambda name: None)
    line = 'needs the package onnx, which is not installed: pip install ".[onnx]" in the folder of weft'
    assert line in refused(tmp_path / "model.onnx")
