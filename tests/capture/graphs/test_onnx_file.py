"""Layers of ONNX files have the products of the captured module; what has no cost or size is refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
from weft.capture.graphs.subject import captured_graph
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


class ListsInside(nn.Module):
    """An encoder of four layers, and a list of lists."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.table = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.ends = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 11))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.ends(self.encoder(self.table(tokens)))


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
    options = {"dynamo": False, "do_constant_folding": False, **options}
    torch.onnx.export(Plain(drawn(module)).eval(), inputs, str(path), **options)
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


@pytest.mark.filterwarnings("ignore")
def test_files_of_both_exporters_have_the_same_modules_and_blocks(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    module = ListsInside()
    example = torch.zeros(2, 5, dtype=torch.long)
    old, new = (
        written(module, example, tmp_path / f"{dynamo}.onnx", dynamo=dynamo) for dynamo in (False, True)
    )
    for level in LEVELS:
        names = [[layer.name for layer in read_onnx(path, level).layers] for path in (old, new)]
        assert names[0] == names[1] or level == "operator"
        assert len(names[0]) == len(names[1]) > 1


Step = tuple[str, list[str], dict[str, object]]


def file_of(
    path: Path,
    *steps: Step,
    samples: Sequence[str | int] = ("batch", 4),
    result: Sequence[str | int] | None = ("batch", 4),
    version: int = 17,
) -> Path:
    """A file of operators, each with the result of the name of its place; the last is the file's."""
    onnx = pytest.importorskip("onnx")
    helper, floating = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node(
            operator,
            inputs,
            **{"outputs": [str(place)], "name": f"/{place}/{operator}", **options},
        )
        for place, (operator, inputs, options) in enumerate(steps)
    ]
    ends = [
        helper.make_tensor_value_info(name, floating, shape)
        for name, shape in (("samples", samples), (nodes[-1].output[0], result))
    ]
    weight = helper.make_tensor("weight", floating, [4, 4], [0.5] * 16)
    numbers = {"axis": [0], "row": [-1], "halves": [-1, 2, 2], "columns": [2, -1]}
    ones = helper.make_tensor("ones", floating, [4], [1.0] * 4)
    constants = [
        helper.make_tensor(name, onnx.TensorProto.INT64, [len(one)], one) for name, one in numbers.items()
    ]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], [weight, ones, *constants])
    versions = [helper.make_opsetid(*one) for one in (("", version), ("own", 1))]
    onnx.save(helper.make_model(graph, opset_imports=versions), str(path))
    return path


PRODUCT: Step = ("MatMul", ["samples", "weight"], {})


@pytest.mark.parametrize("operator", ["Identity", "Transpose", "Cast"])
def test_a_weight_behind_an_operator_is_no_kept_activation(operator: str, tmp_path: Path) -> None:
    behind: Step = (operator, ["weight"], {"to": 1} if operator == "Cast" else {})
    path = file_of(tmp_path / "model.onnx", behind, ("MatMul", ["samples", "0"], {}))
    [layer] = read_onnx(path, "block").layers
    assert layer.kept(ONE) == 4


def renamed(path: Path, spaces: Sequence[str]) -> Path:
    """The file with names without paths, and its modules in the way of torch's newer exporter."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(str(path))
    for place, node in enumerate(model.graph.node):
        node.name = f"node_{place}"
        for space in spaces[place : place + 1]:
            node.metadata_props.add(key="namespace", value=space)
    onnx.save(model, str(path))
    return path


THREE: list[Step] = [PRODUCT, ("Relu", ["0"], {}), ("MatMul", ["1", "weight"], {})]


def test_modules_and_blocks_follow_from_namespaces(tmp_path: Path) -> None:
    spaces = [
        ": own.Net/0: torch.Sequential/0.0: torch.Linear/linear: aten.linear",
        ": own.Net/0: torch.Sequential/0.1: own.Layer/0.1.body: torch.Relu/relu: aten.relu",
        ": own.Net/layers.1: own.Layer/layers.1.end: torch.Linear/linear: aten.linear",
    ]
    path = renamed(file_of(tmp_path / "model.onnx", *THREE), spaces)
    names = {level: [layer.name for layer in read_onnx(path, level).layers] for level in LEVELS}
    assert names["block"] == ["0.0.0", "0.0.1", "layers.1"]
    assert names["module"] == ["0.0.0", "0.0.1.body", "layers.1.end"]
    assert len(names["operator"]) == 3


def test_one_layer_of_operators_without_modules_names_the_other_level(tmp_path: Path) -> None:
    path = renamed(file_of(tmp_path / "model.onnx", *THREE), [])
    note = "names of operators tell no modules; --level operator needs none"
    assert [note in captured_graph(str(path), level)[1] for level in LEVELS] == [True, True, False]
    named = file_of(tmp_path / "model.onnx", *THREE)
    assert not any(note in captured_graph(str(named), level)[1] for level in LEVELS)


MIXING: dict[str, list[Step]] = {
    "a mean over the first axis": [("ReduceMean", ["0"], {"axes": [0]})],
    "a mean over an axis from the end": [("ReduceMean", ["0"], {"axes": [-2], "keepdims": 0})],
    "a sum over the axis of an input": [("ReduceSum", ["0", "axis"], {})],
    "a maximum over all axes": [("ReduceMax", ["0"], {})],
    "a softmax": [("Softmax", ["0"], {"axis": 0})],
    "a softmax of logarithms": [("LogSoftmax", ["0"], {"axis": -2})],
    "joined samples": [("Concat", ["0", "0"], {"axis": 0})],
    "one sample": [("Gather", ["0", "axis"], {"axis": 0})],
    "a mean behind a transpose": [
        ("Transpose", ["0"], {"perm": [1, 0]}),
        ("ReduceMean", ["1"], {"axes": [1]}),
    ],
    "a mean behind a view that joins axes": [
        ("Reshape", ["0", "row"], {}),
        ("Softmax", ["1"], {"axis": 0}),
    ],
    "a softmax behind joined axes that are split and moved": [
        ("Reshape", ["0", "row"], {}),
        ("Reshape", ["1", "halves"], {}),
        ("Transpose", ["2"], {"perm": [2, 0, 1]}),
        ("Softmax", ["3"], {"axis": 1}),
    ],
    "a norm over all axes": [("LayerNormalization", ["0", "0"], {"axis": 0})],
    "products of all pairs": [("Transpose", ["0"], {}), ("MatMul", ["0", "1"], {})],
    "products over samples": [("Transpose", ["0"], {}), ("MatMul", ["1", "0"], {})],
}


@pytest.mark.parametrize("batch", ["batch", 1, 3])
@pytest.mark.parametrize("name", MIXING)
def test_operators_that_mix_samples_are_refused(name: str, batch: str | int, tmp_path: Path) -> None:
    steps = MIXING[name]
    path = file_of(tmp_path / "model.onnx", PRODUCT, *steps, samples=(batch, 4), result=None)
    kind = steps[-1][0]
    problem = f"operator {kind} (/{len(steps)}/{kind}) mixes the samples of a batch; no split of it is equal"
    assert problem in refused(path)


@pytest.mark.parametrize("batch", ["batch", 1, 3])
@pytest.mark.parametrize(
    "steps",
    [
        [("ReduceMean", ["0"], {"axes": [-1]})],
        [("ReduceMax", ["0"], {"axes": [1], "keepdims": 0})],
        [("Softmax", ["0"], {}), ("Concat", ["0", "1"], {"axis": 1})],
        [
            ("Transpose", ["0"], {}),
            ("ReduceSum", ["1", "axis"], {}),
            ("Softmax", ["2"], {"axis": 0}),
            ("Transpose", ["3"], {}),
        ],
        [
            ("Unsqueeze", ["0", "axis"], {}),
            ("ReduceSum", ["1", "axis"], {"keepdims": 0}),
        ],
        [
            ("Reshape", ["0", "row"], {}),
            ("Reshape", ["1", "halves"], {}),
            ("Transpose", ["2"], {"perm": [2, 0, 1]}),
            ("Softmax", ["3"], {"axis": 2}),
            ("ReduceMean", ["4"], {"axes": [0, 2], "keepdims": 0}),
        ],
    ],
)
def test_operators_along_other_axes_are_read(steps: list[Step], batch: str | int, tmp_path: Path) -> None:
    path = file_of(tmp_path / "model.onnx", PRODUCT, *steps, samples=(batch, 4), result=None)
    assert read_onnx(path, "operator").parameters() == 16


TRAINED: Step = (
    "BatchNormalization",
    ["0", "ones", "ones", "ones", "ones"],
    {"training_mode": 1, "outputs": ["1", "mean", "variance"]},
)


@pytest.mark.parametrize(("version", "options"), [(17, TRAINED[2]), (9, {"outputs": ["1", "mean"]})])
def test_batch_norms_in_training_mode_are_refused(
    version: int, options: dict[str, object], tmp_path: Path
) -> None:
    make = partial(file_of, tmp_path / "model.onnx", PRODUCT, result=None, version=version)
    problem = "operator BatchNormalization (/1/BatchNormalization) is in training mode"
    assert problem in refused(make((*TRAINED[:2], options)))
    read_onnx(make((*TRAINED[:2], {})), "operator")


def test_a_view_that_leaves_samples_nowhere_is_refused(tmp_path: Path) -> None:
    make = partial(file_of, tmp_path / "model.onnx", PRODUCT, result=None)
    problem = "operator Reshape (/1/Reshape) leaves the samples of a batch on no axis that weft can follow"
    assert problem in refused(make(("Reshape", ["0", "columns"], {})))


def test_flags_of_values_cost_memory_traffic_alone(tmp_path: Path) -> None:
    """torch's newer exporter writes attention so: rows that mask every position become zeros."""
    softmax: list[Step] = [PRODUCT, ("Softmax", ["0"], {})]
    guarded: list[Step] = [
        ("IsNaN", ["1"], {}),
        ("Not", ["2"], {}),
        ("Sub", ["1", "1"], {}),
        ("Where", ["3", "1", "4"], {}),
    ]
    plain, whole = (
        read_onnx(file_of(tmp_path / "model.onnx", *softmax, *more, result=None), "operator").layers
        for more in ([], guarded)
    )
    assert len(whole) == len(plain) + len(guarded)
    assert sum(one.flops(ONE) for one in whole) == sum(one.flops(ONE) for one in plain)
    assert sum(one.kept(ONE) for one in whole) == sum(one.kept(ONE) for one in plain)


def test_a_softmax_of_old_versions_has_another_axis(tmp_path: Path) -> None:
    steps: list[Step] = [PRODUCT, ("Transpose", ["0"], {}), ("Softmax", ["1"], {})]
    make = partial(file_of, tmp_path / "model.onnx", *steps, result=None)
    assert "operator Softmax (/2/Softmax) mixes" in refused(make(version=12))
    steps[1] = ("Identity", ["0"], {})
    assert read_onnx(file_of(tmp_path / "model.onnx", *steps, version=12), "block").parameters() == 16


@pytest.mark.parametrize("batch", ["batch", 1, 3])
def test_a_result_with_samples_on_another_axis_is_refused(batch: str | int, tmp_path: Path) -> None:
    make = partial(file_of, tmp_path / "model.onnx", PRODUCT, samples=(batch, 4), result=None)
    size = 3 if batch == "batch" else batch
    line = "result 1 of shape {} has no samples on its first axis"
    assert line.format([4, size]) in refused(make(("Transpose", ["0"], {})))
    assert line.format([1, size, 4]) in refused(make(("Unsqueeze", ["0", "axis"], {})))


def model_of(path: Path, operator: str, *, axis: str | int = 4, domain: str = "") -> Path:
    last: Step = (operator, ["0"], {"name": f"/last/{operator}", "domain": domain})
    return file_of(path, PRODUCT, last, samples=("batch", axis), result=("batch", axis))


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
    assert refused(tmp_path / "absent.onnx").endswith("absent.onnx: does not exist")
    (tmp_path / "folder.onnx").mkdir()
    assert refused(tmp_path / "folder.onnx").endswith("folder.onnx: is a folder")


def test_an_operator_of_a_domain_without_a_version_is_refused_by_name(tmp_path: Path) -> None:
    path = model_of(tmp_path / "model.onnx", "Foo", domain="unversioned")
    assert refused(path).endswith("operator Foo (/last/Foo) has no known cost")


def test_an_operator_on_impossible_shapes_is_named_with_them(tmp_path: Path) -> None:
    path = file_of(tmp_path / "model.onnx", ("Relu", ["samples"], {}), PRODUCT, samples=("batch", 5))
    problem = "operator MatMul (/1/MatMul) of samples [3, 5] and weight [4, 4] cannot be computed: "
    assert problem in refused(path)
    path = file_of(tmp_path / "model.onnx", PRODUCT, ("MatMul", ["absent", "0"], {}), result=None)
    assert "MatMul (/1/MatMul) of absent of unknown shape and 0 [3, 4] cannot be computed" in refused(path)


def test_without_the_package_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr("weft.capture.graphs.onnx_file.find_spec", lambda name: None)
    line = 'needs the package onnx, which is not installed: pip install ".[onnx]" in the folder of weft'
    assert line in refused(tmp_path / "model.onnx")
