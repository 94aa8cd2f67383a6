"""`OnnxOperators`: the operators of an ONNX file, their costs and the tensors of their gradients.

Constants, shapes, and whatever follows from inputs alone belong to the operators that read them, without
cost. Views cost nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.capture.graphs.onnx_values import OnnxValues, words_of
from weft.describe.layer import Matmul, sample_product

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
KNOWN = (*_VIEWS, *_PRODUCTS, *_RECURRENT, *_OF_RESULT, *_OF_NOTHING, *_OF_INPUTS)
_TRAINING_MODE = 14  # Before this version of operators, a batch norm that trains has several results.
_BLOCK = re.compile(r"(^|[._])\d+$")


@dataclass(frozen=True)
class OnnxOperator:
    """An operator that reads samples and, itself or before it, trained parameters."""

    name: str
    kind: str
    node: Any
    reads: tuple[int, ...]
    inputs: tuple[int, ...]
    parameters: tuple[str, ...]

    def key(self, level: str) -> str:
        """Return the path of the operator's module, or of its block, from its name."""
        parts = [part for part in self.name.split("/")[:-1] if part]
        if level == "block":
            end = next((number for number, part in enumerate(parts) if _BLOCK.search(part)), 0)
            # An element of a list may be a list itself.
            while end + 1 < len(parts) and parts[end + 1].startswith(parts[end] + "."):
                end += 1
            parts = parts[: end + 1]
        return ".".join(parts)


class OnnxOperators:
    """The operators of a file with samples and parameters, in the file's order.

    Raises:
        InputError: when one has no known cost, or mixes samples because it trains.
    """

    def __init__(self, values: OnnxValues) -> None:
        self._values = values
        # By the name of a value: what its views show, the inputs and the parameters that it follows from.
        self._base: dict[str, str] = {}
        self._read = {name: frozenset({number}) for number, name in enumerate(values.inputs)}
        self._given = {name: frozenset({name}) for name in values.weights}
        self._maker: dict[str, int] = {}
        self.all = list(self._found())

    def leading_to(self, name: str) -> list[int]:
        """Return the numbers of the operators that a value follows from; of none without parameters."""
        found, waiting = set[int](), [self._maker[self._base[name]]] if name in self._base else []
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                waiting += self.all[one].reads
        return sorted(found)

    def _found(self) -> Iterator[OnnxOperator]:
        """Yield the operators with samples and parameters, and note what other values follow from."""
        count = 0
        for node in self._values.graph.node:
            read = [name for name in node.input if name]
            samples = frozenset[int]().union(*(self._read.get(name, frozenset()) for name in read))
            given = frozenset[str]().union(*(self._given.get(name, frozenset()) for name in read))
            if node.op_type == "BatchNormalization":
                given -= set(node.input[3:])
                if self._trains(node):
                    problem = "is in training mode and mixes the samples of a batch"
                    raise self._values.refuse(f"{words_of(node)} {problem}; export the model in eval()")
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
        if max((one.version for one in self._values.versions if not one.domain), default=0) < _TRAINING_MODE:
            return sum(map(bool, node.output)) > 1
        return any(one.name == "training_mode" and one.i for one in node.attribute)

    def _operator(
        self, node: Any, bases: Sequence[str], samples: frozenset[int], given: frozenset[str]
    ) -> OnnxOperator:
        if node.op_type not in KNOWN or node.domain not in ("", "ai.onnx"):
            raise self._values.refuse(f"{words_of(node)} has no known cost")
        return OnnxOperator(
            name=_path(node),
            kind=node.op_type,
            node=node,
            reads=tuple(sorted({self._maker[base] for base in bases})),
            inputs=tuple(sorted(samples)),
            parameters=tuple(sorted(given)),
        )

    def products(self, one: OnnxOperator) -> tuple[list[Matmul], list[Matmul]]:
        """Return the products with weights, and those of values, of one sample."""
        node = one.node
        if one.kind in _RECURRENT:
            return list(self._steps(node)), []
        if one.kind not in _PRODUCTS:
            return [], []
        left, right, result = (self._values.shape(name) for name in (*node.input[:2], node.output[0]))
        if one.kind == "Gemm":
            transposed = any(item.name == "transA" and item.i for item in node.attribute)
            return [
                sample_product(1, result[0] // self._values.samples, left[0 if transposed else -1], result[1])
            ], []
        if one.kind == "Conv":
            rows = math.prod(result[2:])
            return [sample_product(1, rows, math.prod(right[1:]), right[0])], []
        if one.kind == "ConvTranspose":
            return [sample_product(1, math.prod(left[2:]), right[0], math.prod(right[1:]))], []
        rows = math.prod(result[:-1]) // self._values.samples
        if node.input[0] in self._base and node.input[1] in self._base:
            count = math.prod(result[:-2]) // self._values.samples
            return [], [sample_product(count, result[-2], left[-1], result[-1])]
        return [sample_product(1, rows, left[-1], result[-1])], []

    def touched(self, one: OnnxOperator) -> int:
        """Return the elements of the values that an operator reads and writes."""
        names = [name for name in (*one.node.input, *one.node.output) if name in self._base]
        return sum(map(self._values.elements, names))

    def step_elements(self, one: OnnxOperator) -> float:
        """Return the elements that a recurrent operator keeps inside: its gates and few vectors of a step."""
        if one.kind not in _RECURRENT:
            return 0.0
        steps, samples, _ = self._values.shape(one.node.input[0])
        directions, gates, _ = self._values.shape(one.node.input[1])
        states = self._values.shape(one.node.input[2])[-1]
        return steps * samples * directions * (gates + _RECURRENT[one.kind] * states)

    def kept(self, one: OnnxOperator) -> list[str]:
        """Return the names of the values that an operator's gradients need."""
        node = one.node
        if one.kind in _OF_RESULT:
            return [node.output[0]]
        if one.kind == "Gather":
            return [name for name in node.input[1:2] if name in self._values.shapes]
        values = [
            self._base.get(name, name) for name in node.input if name in self._base or self._read.get(name)
        ]
        scaled = one.kind in ("Mul", "Div") and not one.parameters and len(values) < 2
        if one.kind in _OF_NOTHING or one.kind in _VIEWS or scaled:
            return []
        return values

    def _steps(self, node: Any) -> Iterator[Matmul]:
        steps = self._values.shape(node.input[0])[0]
        directions, gates, inner = self._values.shape(node.input[1])
        states = self._values.shape(node.input[2])[-1]
        for _ in range(directions):
            yield sample_product(1, steps, inner, gates)
            yield from [sample_product(1, 1, states, gates)] * steps


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
