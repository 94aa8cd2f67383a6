"""`read_onnx`: the layers of an ONNX file, with costs by a table of operators; without torch.

Floating initializers of two or more elements are trained parameters, but for the statistics of batch norms.
Constants, shapes, and whatever follows from inputs alone belong to the layers that read them, without cost.
Views cost nothing. Kept activations are those that torch keeps for the gradients of these operators.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from weft.capture.graphs.joining import common_path, joined, unused_name
from weft.capture.graphs.sample_axes import SampleAxes, SamplesAt
from weft.describe.amount import Amount
from weft.describe.families.transformer import passes
from weft.describe.layer import Layer, Matmul, distinct_kinds, sample_product
from weft.describe.layer_graph import LayerGraph, TiedParameters
from weft.errors import InputError, Violation
from weft.installed import remedy

_FLOATING = {1: 4, 10: 4, 11: 4, 16: 4}  # Kinds of elements; all count as elements of the computations.
_ELEMENT_BYTES = {2: 1, 3: 1, 6: 4, 7: 8, 9: 1}
_VIEWS = [
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Identity",
    "Dropout",
    "Cast",
    "Transpose",
    "Slice",
    "Split",
    "Expand",
]
_SIZES = ("Shape", "Size")
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_RECURRENT = {"LSTM": 3, "GRU": 2, "RNN": 1}  # Vectors that a step keeps beside its gates.
# Operators by the tensors that their gradients need.
_OF_RESULT = [
    "Relu",
    "LeakyRelu",
    "Elu",
    "Sigmoid",
    "Tanh",
    "Softmax",
    "LogSoftmax",
    "Exp",
    "Sqrt",
    "Reciprocal",
]
_OF_NOTHING = [
    "Add",
    "Sub",
    "Neg",
    "Sum",
    "Concat",
    "Pad",
    "AveragePool",
    "GlobalAveragePool",
    "ReduceMean",
    "ReduceSum",
    "Gather",
    "Embedding",
    "Tile",
    "Mean",
    "Where",
    # Flags and steps have no gradients.
    "And",
    "Ceil",
    "Equal",
    "Floor",
    "Greater",
    "GreaterOrEqual",
    "IsInf",
    "IsNaN",
    "Less",
    "LessOrEqual",
    "Not",
    "Or",
    "Round",
    "Sign",
    "Trilu",
    "Xor",
]
_OF_INPUTS = [
    "Mul",
    "Div",
    "Pow",
    "Erf",
    "Gelu",
    "Log",
    "Abs",
    "Clip",
    "Min",
    "Max",
    "Sin",
    "Cos",
    "Softplus",
    "Softsign",
    "HardSigmoid",
    "HardSwish",
    "Mish",
    "Selu",
    "Celu",
    "PRelu",
    "BatchNormalization",
    "LayerNormalization",
    "InstanceNormalization",
    "GroupNormalization",
    "RMSNormalization",
    "LRN",
    "SimplifiedLayerNormalization",
    "MaxPool",
    "GlobalMaxPool",
    "LpNormalization",
    "ReduceMax",
    "ReduceMin",
    "ReduceL2",
    "Resize",
]
_KNOWN = (*_VIEWS, *_PRODUCTS, *_RECURRENT, *_OF_RESULT, *_OF_NOTHING, *_OF_INPUTS)
# A batch without a size gets one that few other sizes are multiples of.
_SAMPLES = 3
_TRAINING_MODE = 14  # Before this version of operators, a batch norm that trains has several results.
_BLOCK = re.compile(r"(^|[._])\d+$")


@dataclass(frozen=True)
class _Operator:
    """An operator that reads samples and, itself or before it, trained parameters."""

    name: str
    kind: str
    node: Any
    reads: tuple[int, ...]
    inputs: tuple[int, ...]
    parameters: tuple[str, ...]


def read_onnx(path: Path, level: str) -> LayerGraph:
    """Return the costed layers of an ONNX file.

    Raises:
        InputError: when the package `onnx` or the file is missing, a size is unknown, or an operator has no
            known cost or mixes samples.
    """
    if find_spec("onnx") is None:
        problem = f"needs the package onnx, which is not installed: {remedy('onnx')}"
        raise InputError(Violation(str(path), problem))
    return _OnnxGraph(path).layers(level)


class _OnnxGraph:
    """A loaded file: shapes of its values, and its operators."""

    def __init__(self, path: Path) -> None:
        import onnx

        self._where, self._onnx = str(path), onnx
        if not path.is_file():
            raise self._refuse("is a folder" if path.is_dir() else "does not exist")
        try:
            model = onnx.load(str(path))
            # Inference would refuse the file for a domain without a version, and name no operator.
            unknown = {one.domain for one in model.graph.node} - {one.domain for one in model.opset_import}
            model.opset_import.extend(onnx.helper.make_opsetid(one, 1) for one in unknown - {"", "ai.onnx"})
            self.inputs = self._sized_inputs(model.graph)
            inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        except InputError:
            raise
        except Exception as error:
            (line, *_) = str(error).splitlines() or [""]
            raise InputError(
                Violation(self._where, f"no ONNX file: {type(error).__name__}: {line}")
            ) from None
        self.graph, self._versions = inferred.graph, model.opset_import
        values = (*self.graph.input, *self.graph.value_info, *self.graph.output)
        self._shapes = {one.name: self._shape_of(one) for one in values}
        self._kinds = {one.name: one.type.tensor_type.elem_type for one in values}
        weights = {one.name: one for one in self.graph.initializer}
        self._shapes |= {name: tuple(one.dims) for name, one in weights.items()}
        self._kinds |= {name: one.data_type for name, one in weights.items()}
        self._weights = {
            name: math.prod(one.dims)
            for name, one in weights.items()
            if one.data_type in _FLOATING and math.prod(one.dims) > 1
        }
        self.samples = self.shape(self.inputs[0])[0]
        # By the name of a value: what its views show, the inputs and the parameters that it follows from.
        self._base: dict[str, str] = {}
        self._read: dict[str, frozenset[int]] = {name: frozenset({n}) for n, name in enumerate(self.inputs)}
        self._given: dict[str, frozenset[str]] = {name: frozenset({name}) for name in self._weights}
        self._maker: dict[str, int] = {}
        self.operators = list(self._operators())
        if any(self._shapes.get(name) is None for node in self.graph.node for name in node.output if name):
            self._evaluate(model)
        self._places = SampleAxes(model, self._shapes, self.inputs, self.samples, _KNOWN)
        for node in self.graph.node:
            if (problem := self._places.problem(node)) is not None:
                raise self._refuse(f"{_named(node)} {problem}")

    def _refuse(self, problem: str) -> InputError:
        return InputError(Violation(self._where, problem))

    def _sized_inputs(self, graph: Any) -> list[str]:
        """Give each input few samples if its batch has no size, and return the inputs' names."""
        constants = {one.name for one in graph.initializer}
        inputs = [one for one in graph.input if one.name not in constants]
        for one in inputs:
            axes = one.type.tensor_type.shape.dim
            if not axes:
                raise self._refuse(f"input {one.name} has no axis of samples")
            if not axes[0].dim_value:
                axes[0].dim_value = _SAMPLES
            if unsized := [axis.dim_param for axis in axes if not axis.dim_value]:
                raise self._refuse(
                    f"input {one.name} has an axis {unsized[0]!r} without a size; export it with one"
                )
        if not inputs:
            raise self._refuse("the file has no input")
        return [one.name for one in inputs]

    def _evaluate(self, model: Any) -> None:
        """Add the shapes and kinds that inference does not find, from a run of the file on zeros."""
        nodes = self.graph.node
        if not self._failure(model, len(nodes)):
            return
        fails = partial(self._failure, model)
        count = 1 + bisect_left(range(1, len(nodes)), True, key=lambda count: bool(fails(count)))
        line = fails(count)
        fails(count - 1)  # It notes the shapes of all values in front.
        node = nodes[count - 1]
        shapes = {name: self._shapes.get(name) for name in node.input if name}
        given = " and ".join(
            f"{name} {'of unknown shape' if shape is None else list(shape)}" for name, shape in shapes.items()
        )
        raise self._refuse(f"{_named(node)} of {given} cannot be computed: {line}")

    def _failure(self, model: Any, count: int) -> str:
        """Run the first operators, and return the first line of the error if they cannot be computed."""
        try:
            self._run(model, count)
        except Exception as error:
            lines = str(error.__cause__ or error).splitlines()
            return lines[0] if lines else type(error).__name__
        return ""

    def _run(self, model: Any, count: int) -> None:
        """Add the shapes and kinds of the results of the first operators, from a run of them on zeros."""
        from onnx.reference import ReferenceEvaluator

        helper = self._onnx.helper
        del model.graph.node[:], model.graph.output[:]
        model.graph.node.extend(self.graph.node[:count])
        names = [name for node in model.graph.node for name in node.output if name]
        model.graph.output.extend(self._onnx.ValueInfoProto(name=name) for name in names)
        zeros = {
            name: np.zeros(self.shape(name), helper.tensor_dtype_to_np_dtype(self._kinds[name]))
            for name in self.inputs
        }
        for name, value in zip(names, ReferenceEvaluator(model).run(None, zeros), strict=True):
            if isinstance(value, np.ndarray | np.generic):
                self._shapes[name] = value.shape
                self._kinds[name] = helper.np_dtype_to_tensor_dtype(value.dtype)

    @staticmethod
    def _shape_of(value: Any) -> tuple[int, ...] | None:
        axes = value.type.tensor_type.shape.dim
        known = value.type.tensor_type.HasField("shape") and all(axis.HasField("dim_value") for axis in axes)
        return tuple(axis.dim_value for axis in axes) if known else None

    def _operators(self) -> Iterator[_Operator]:
        """Yield the operators with samples and parameters, and note what other values follow from."""
        count = 0
        for node in self.graph.node:
            read = [name for name in node.input if name]
            samples = frozenset[int]().union(*(self._read.get(name, frozenset()) for name in read))
            given = frozenset[str]().union(*(self._given.get(name, frozenset()) for name in read))
            if node.op_type == "BatchNormalization":
                given -= set(node.input[3:])
                if self._trains(node):
                    problem = "is in training mode and mixes the samples of a batch"
                    raise self._refuse(f"{_named(node)} {problem}; export the model in eval()")
            bases = [self._base[name] for name in read if name in self._base]
            if node.op_type in _SIZES:
                continue
            if bases and node.op_type in _VIEWS:
                self._base |= dict.fromkeys(node.output, bases[0])
            elif bases or (samples and given):
                yield self._operator(node, bases, samples, given)
                self._base |= {name: name for name in node.output if name}
                self._maker |= dict.fromkeys(node.output, count)
                count += 1
            else:
                self._read |= dict.fromkeys(node.output, samples)
                self._given |= dict.fromkeys(node.output, given)

    def _trains(self, node: Any) -> bool:
        """Return whether a batch norm takes its statistics from the batch."""
        if max((one.version for one in self._versions if not one.domain), default=0) < _TRAINING_MODE:
            return sum(map(bool, node.output)) > 1
        return any(one.name == "training_mode" and one.i for one in node.attribute)

    def _operator(
        self, node: Any, bases: Sequence[str], samples: frozenset[int], given: frozenset[str]
    ) -> _Operator:
        if node.op_type not in _KNOWN or node.domain not in ("", "ai.onnx"):
            raise self._refuse(f"{_named(node)} has no known cost")
        return _Operator(
            name=_path(node),
            kind=node.op_type,
            node=node,
            reads=tuple(sorted({self._maker[base] for base in bases})),
            inputs=tuple(sorted(samples)),
            parameters=tuple(sorted(given)),
        )

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._shapes.get(name)
        if found is None:
            raise self._refuse(f"the shape of {name} is unknown")
        return found

    def layers(self, level: str) -> LayerGraph:
        """Return the layers of a level."""
        ends = [one.name for one in self.graph.output]
        if len(ends) != 1 or ends[0] not in self._base:
            raise self._refuse(f"{len(ends)} results; needed: one, which follows from inputs and parameters")
        shape = self.shape(ends[0])
        if shape[:1] != (self.samples,) or self._places.get(ends[0]) not in (None, SamplesAt(0)):
            raise self._refuse(f"result {ends[0]} of shape {list(shape)} has no samples on its first axis")
        needed = self._leading_to(self._maker[self._base[ends[0]]])
        operators = [self.operators[number] for number in needed]
        place = {number: index for index, number in enumerate(needed)}
        reads = [tuple(place[one] for one in operator.reads) for operator in operators]
        keys = None if level == "operator" else [_key(one, level) for one in operators]
        groups = joined(reads, (), keys)
        layer_of = {node: index for index, group in enumerate(groups) for node in group}
        edges = {(layer_of[one], layer_of[node]) for node in layer_of for one in reads[node]}
        inputs = {(number, layer_of[node]) for node in layer_of for number in operators[node].inputs}
        users: dict[str, set[int]] = {}
        for node, layer in layer_of.items():
            for name in operators[node].parameters:
                users.setdefault(name, set()).add(layer)
        kept: set[str] = set()
        taken: set[str] = set()
        layers = [
            self._layer([operators[node] for node in group], index, users, kept, taken, level)
            for index, group in enumerate(groups)
        ]
        first = self.inputs[0]
        tokens = self._kinds[first] not in _FLOATING and len(self.shape(first)) > 1
        return LayerGraph(
            name=Path(self._where).stem,
            layers=distinct_kinds(layers),
            edges=tuple(sorted(one for one in edges if one[0] != one[1])),
            sequence=self.shape(first)[1] if tokens else 1,
            vocabulary=self.shape(ends[0])[-1],
            inputs=tuple(sorted(inputs)),
            tied=tuple(
                TiedParameters(tuple(sorted(used)), Amount.of(self._weights[name]))
                for name, used in users.items()
                if len(used) > 1
            ),
        )

    def _leading_to(self, end: int) -> list[int]:
        found, waiting = set[int](), [end]
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                waiting += self.operators[one].reads
        return sorted(found)

    def _layer(
        self,
        operators: Sequence[_Operator],
        index: int,
        users: Mapping[str, set[int]],
        kept: set[str],
        taken: set[str],
        level: str,
    ) -> Layer:
        """Return the costs of a layer; tensors that others before it keep, and have, count there."""
        weights, products, elements, kernels, tensors = list[Matmul](), list[Matmul](), 0.0, 0, list[str]()
        for one in operators:
            of_weights, of_values = self._products(one)
            weights += of_weights
            products += of_values
            if not of_weights and not of_values:
                touched = [name for name in (*one.node.input, *one.node.output) if name in self._base]
                elements += sum(math.prod(self.shape(name)) for name in touched)
                kernels += 1
            # Each vector inside a step is written and read once.
            elements += 2.0 * self._step_elements(one)
            tensors += [name for name in self._kept(one) if name not in kept]
            kept |= set(tensors)
        shapes = [(self._kinds[name], math.prod(self.shape(name))) for name in dict.fromkeys(tensors)]
        steps = sum(self._step_elements(one) for one in operators)
        parameters = Amount.of(
            sum(
                self._weights[name]
                for name in {n for one in operators for n in one.parameters if min(users[n]) == index}
            )
        )
        kinds = list(dict.fromkeys(one.kind.lower() for one in operators))
        path = common_path([_key(one, level) for one in operators])
        kind = "+".join(kinds[:3]) + ("+..." if len(kinds) > 3 else "")
        plain = level == "operator" or not path
        given = [name for one in operators for name in one.node.output[:1]]
        share = 1.0 / self.samples
        return Layer(
            name=unused_name(".".join(filter(None, (path, kind))) if plain else path, taken),
            kind=kind,
            parameters=parameters,
            kept=Amount.of(
                share * (steps + sum(size for kind, size in shapes if kind in _FLOATING)), batch=1
            ),
            kept_bytes=Amount.of(
                share
                * sum(_ELEMENT_BYTES.get(kind, 8) * size for kind, size in shapes if kind not in _FLOATING),
                batch=1,
            ),
            sent=Amount.of(share * math.prod(self.shape(given[-1])), batch=1),
            **passes(
                weights,
                products,
                memory=Amount.of(share * elements, batch=1),
                kernels=kernels,
                parameters=parameters,
            ),
        )

    def _products(self, one: _Operator) -> tuple[list[Matmul], list[Matmul]]:
        """Return the products with weights, and those of values, of one sample."""
        node = one.node
        if one.kind in _RECURRENT:
            return list(self._steps(node)), []
        if one.kind not in _PRODUCTS:
            return [], []
        left, right, result = (self.shape(name) for name in (*node.input[:2], node.output[0]))
        if one.kind == "Gemm":
            transposed = any(item.name == "transA" and item.i for item in node.attribute)
            return [
                sample_product(1, result[0] // self.samples, left[0 if transposed else -1], result[1])
            ], []
        if one.kind == "Conv":
            rows = math.prod(result[2:])
            return [sample_product(1, rows, math.prod(right[1:]), right[0])], []
        if one.kind == "ConvTranspose":
            return [sample_product(1, math.prod(left[2:]), right[0], math.prod(right[1:]))], []
        rows = math.prod(result[:-1]) // self.samples
        if node.input[0] in self._base and node.input[1] in self._base:
            count = math.prod(result[:-2]) // self.samples
            return [], [sample_product(count, result[-2], left[-1], result[-1])]
        return [sample_product(1, rows, left[-1], result[-1])], []

    def _steps(self, node: Any) -> Iterator[Matmul]:
        steps = self.shape(node.input[0])[0]
        directions, gates, inner = self.shape(node.input[1])
        states = self.shape(node.input[2])[-1]
        for _ in range(directions):
            yield sample_product(1, steps, inner, gates)
            yield from [sample_product(1, 1, states, gates)] * steps

    def _step_elements(self, one: _Operator) -> float:
        """Return the elements that a recurrent operator keeps inside: its gates and few vectors of a step."""
        if one.kind not in _RECURRENT:
            return 0.0
        steps, samples, _ = self.shape(one.node.input[0])
        directions, gates, _ = self.shape(one.node.input[1])
        states = self.shape(one.node.input[2])[-1]
        return steps * samples * directions * (gates + _RECURRENT[one.kind] * states)

    def _kept(self, one: _Operator) -> list[str]:
        """Return the names of the values that an operator's gradients need."""
        node = one.node
        if one.kind in _OF_RESULT:
            return [node.output[0]]
        if one.kind == "Gather":
            return [name for name in node.input[1:2] if name in self._shapes]
        values = [
            self._base.get(name, name) for name in node.input if name in self._base or self._read.get(name)
        ]
        scaled = one.kind in ("Mul", "Div") and not one.parameters and len(values) < 2
        if one.kind in _OF_NOTHING or one.kind in _VIEWS or scaled:
            return []
        return values


def _named(node: Any) -> str:
    return f"operator {node.op_type} ({node.name or node.output[0]})"


def _path(node: Any) -> str:
    """Return the modules of an operator and its name, split by `/`; some are in its metadata."""
    name = str(node.name or node.output[0])
    # The newer exporter of torch writes `: Net/layers.0: Layer/linear: aten.linear`, the operator last.
    spaces = [one.value for one in node.metadata_props if one.key == "namespace"]
    if "/" in name or not spaces:
        return name
    parts, outer = list[str](), ""
    for space in spaces[0].split("/")[:-1]:
        module = space.partition(": ")[0]
        part = module.removeprefix(f"{outer}.")
        # An element of a `Sequential` has the name of that in its own, as in names of the older exporter.
        parts.append(f"{parts[-1]}.{part}" if part.isdigit() and outer else part)
        outer = module
    return "/".join([*parts, name])


def _key(one: _Operator, level: str) -> str:
    """Return the path of an operator's module, or of its block, from its name."""
    parts = [part for part in one.name.split("/")[:-1] if part]
    if level == "block":
        end = next((number for number, part in enumerate(parts) if _BLOCK.search(part)), 0)
        # An element of a list may be a list itself.
        while end + 1 < len(parts) and parts[end + 1].startswith(parts[end] + "."):
            end += 1
        parts = parts[: end + 1]
    return ".".join(parts)
