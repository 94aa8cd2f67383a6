"""`OnnxValues`: the values of an ONNX file, with their shapes and kinds; without torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import InputError, Violation

FLOATING = frozenset({1, 10, 11, 16})  # Kinds of elements that count as those of the computations.
# A batch without a size gets one that few other sizes are multiples of.
_SAMPLES = 3


class OnnxValues:
    """A loaded file: its graph, and the shapes and kinds of the graph's values.

    Attributes:
        model: the file as it was loaded; a run on zeros leaves it with all operators and their results.
        graph: its graph, with what inference finds.
        versions: of the sets of operators.
        inputs: the names of the inputs; the first axis has the `samples`.
        kinds: of the elements of values, by name.
        weights: the elements of each initializer that is trained, by name.

    Raises:
        InputError: when the file is missing or broken, or an input has no size.
    """

    def __init__(self, path: Path) -> None:
        import onnx

        self.where, self._onnx = str(path), onnx
        if not path.is_file():
            raise self.refuse("is a folder" if path.is_dir() else "does not exist")
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
            raise InputError(Violation(self.where, f"no ONNX file: {type(error).__name__}: {line}")) from None
        self.model, self.graph, self.versions = model, inferred.graph, model.opset_import
        values = (*self.graph.input, *self.graph.value_info, *self.graph.output)
        self.shapes = {one.name: _shape_of(one) for one in values}
        self.kinds = {one.name: one.type.tensor_type.elem_type for one in values}
        weights = {one.name: one for one in self.graph.initializer}
        self.shapes |= {name: tuple(one.dims) for name, one in weights.items()}
        self.kinds |= {name: one.data_type for name, one in weights.items()}
        self.weights = {
            name: math.prod(one.dims)
            for name, one in weights.items()
            if one.data_type in FLOATING and math.prod(one.dims) > 1
        }
        self.samples = self.shape(self.inputs[0])[0]

    def refuse(self, problem: str) -> InputError:
        """Return the error that names the file and its problem."""
        return InputError(Violation(self.where, problem))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value.

        Raises:
            InputError: when it is unknown.
        """
        found = self.shapes.get(name)
        if found is None:
            raise self.refuse(f"the shape of {name} is unknown")
        return found

    def elements(self, name: str) -> int:
        """Return the count of a value's elements."""
        return math.prod(self.shape(name))

    def complete(self) -> None:
        """Add the shapes and kinds that inference does not find, from a run of the file on zeros.

        Raises:
            InputError: when an operator cannot be computed.
        """
        nodes = self.graph.node
        if all(self.shapes.get(name) is not None for node in nodes for name in node.output if name):
            return
        if not self._failure(len(nodes)):
            return
        count = 1 + bisect_left(range(1, len(nodes)), True, key=lambda count: bool(self._failure(count)))
        line = self._failure(count)
        self._failure(count - 1)  # It notes the shapes of all values in front.
        node = nodes[count - 1]
        shapes = {name: self.shapes.get(name) for name in node.input if name}
        given = " and ".join(
            f"{name} {'of unknown shape' if shape is None else list(shape)}" for name, shape in shapes.items()
        )
        raise self.refuse(f"{words_of(node)} of {given} cannot be computed: {line}")

    def _sized_inputs(self, graph: Any) -> list[str]:
        """Give each input few samples if its batch has no size, and return the inputs' names."""
        constants = {one.name for one in graph.initializer}
        inputs = [one for one in graph.input if one.name not in constants]
        for one in inputs:
            axes = one.type.tensor_type.shape.dim
            if not axes:
                raise self.refuse(f"input {one.name} has no axis of samples")
            if not axes[0].dim_value:
                axes[0].dim_value = _SAMPLES
            if unsized := [axis.dim_param for axis in axes if not axis.dim_value]:
                raise self.refuse(
                    f"input {one.name} has an axis {unsized[0]!r} without a size; export it with one"
                )
        if not inputs:
            raise self.refuse("the file has no input")
        return [one.name for one in inputs]

    def _failure(self, count: int) -> str:
        """Run the first operators, and return the first line of the error if they cannot be computed."""
        try:
            self._run(count)
        except Exception as error:
            lines = str(error.__cause__ or error).splitlines()
            return lines[0] if lines else type(error).__name__
        return ""

    def _run(self, count: int) -> None:
        """Add the shapes and kinds of the results of the first operators, from a run of them on zeros."""
        from onnx.reference import ReferenceEvaluator

        helper, model = self._onnx.helper, self.model
        del model.graph.node[:], model.graph.output[:]
        model.graph.node.extend(self.graph.node[:count])
        names = [name for node in model.graph.node for name in node.output if name]
        model.graph.output.extend(self._onnx.ValueInfoProto(name=name) for name in names)
        zeros = {
            name: np.zeros(self.shape(name), helper.tensor_dtype_to_np_dtype(self.kinds[name]))
            for name in self.inputs
        }
        for name, value in zip(names, ReferenceEvaluator(model).run(None, zeros), strict=True):
            if isinstance(value, np.ndarray | np.generic):
                self.shapes[name] = value.shape
                self.kinds[name] = helper.np_dtype_to_tensor_dtype(value.dtype)


def words_of(node: Any) -> str:
    """Return an operator's kind and name, for messages."""
    return f"operator {node.op_type} ({node.name or node.output[0]})"


def _shape_of(value: Any) -> tuple[int, ...] | None:
    axes = value.type.tensor_type.shape.dim
    known = value.type.tensor_type.HasField("shape") and all(axis.HasField("dim_value") for axis in axes)
    return tuple(axis.dim_value for axis in axes) if known else None
