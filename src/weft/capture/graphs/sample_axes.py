"""`SampleAxes`: the axis of the samples of each value in an ONNX file, and the operators that mix samples.

The axis is followed from the inputs on, operator by operator, without torch. Where it is unknown, such as
behind a view that joins axes, no operator is said to mix samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_Shape = tuple[int, ...]

# Operators that combine, or choose, elements along one axis: the attribute that names it, and its default.
_ALONG = {
    "ArgMax": ("axis", 0),
    "ArgMin": ("axis", 0),
    "Concat": ("axis", 0),
    "Gather": ("axis", 0),
    "GRU": ("layout", 0),
    "LogSoftmax": ("axis", -1),
    "LpNormalization": ("axis", -1),
    "LSTM": ("layout", 0),
    "RNN": ("layout", 0),
    "Softmax": ("axis", -1),
    "Split": ("axis", 0),
    "TopK": ("axis", -1),
}
_FLATTENING_SOFTMAX = 13  # Before this version of operators, Softmax has 1 as its default.


class SampleAxes:
    """The axis of the samples, by the name of a value.

    Args:
        model: the file.
        shapes: of each value; None: unknown.
        inputs: names of the values that have samples on axis 0.
        samples: the size of a batch.
    """

    def __init__(
        self, model: Any, shapes: Mapping[str, _Shape | None], inputs: Sequence[str], samples: int
    ) -> None:
        import onnx

        self._onnx, self._shapes, self._samples = onnx, shapes, samples
        self._version = max((one.version for one in model.opset_import if not one.domain), default=0)
        self._constants = {one.name: one for one in model.graph.initializer} | {
            node.output[0]: one.t
            for node in model.graph.node
            for one in node.attribute
            if node.op_type == "Constant" and one.name == "value"
        }
        self._axis = {name: 0 for name in inputs if (shapes[name] or (0,))[0] == samples}

    def get(self, name: str) -> int | None:
        """Return the axis of a value; None: it has no samples, or their axis is unknown."""
        return self._axis.get(name)

    def mixes(self, node: Any) -> bool:
        """Return whether an operator mixes samples, and note the axis of its results."""
        options = {one.name: self._onnx.helper.get_attribute_value(one) for one in node.attribute}
        read = {place: name for place, name in enumerate(node.input) if name in self._axis}
        if any(self._axis[name] in self._along(node, place, options) for place, name in read.items()):
            return True
        for place, name in enumerate(node.output):
            shape = self._shapes.get(name)
            if shape is None or node.op_type in ("Shape", "Size"):
                continue
            found = {self._moved(node, one, (place, shape), options) for one in read}
            axes = {one for one in found if one is not None and shape[one : one + 1] == (self._samples,)}
            if len(axes) > 1:
                return True
            if axes:
                self._axis[name] = axes.pop()
        return False

    def _along(self, node: Any, place: int, options: Mapping[str, Any]) -> set[int]:
        """Return the axes of an input along which an operator combines, or chooses, elements."""
        rank = len(self._shapes[node.input[place]] or ())
        if node.op_type.startswith("Reduce"):
            return self._listed(
                node, options, rank, range(0 if options.get("noop_with_empty_axes") else rank)
            )
        if node.op_type == "CumSum":
            return self._listed(node, options, rank, ())
        if node.op_type == "Gemm" and place < 2:
            return {1 - place if not options.get("transB" if place else "transA") else place}
        if node.op_type == "MatMul":
            return {max(rank - 2, 0) if place else rank - 1}
        if node.op_type not in _ALONG or (place and node.op_type != "Concat"):
            return set()
        name, default = _ALONG[node.op_type]
        if "Softmax" in node.op_type and self._version < _FLATTENING_SOFTMAX:
            default = 1
        return {options.get(name, default) % rank} if rank else set()

    def _listed(self, node: Any, options: Mapping[str, Any], rank: int, default: Sequence[int]) -> set[int]:
        """Return the axes that an attribute, or the second input, lists; none if they are computed."""
        given = options.get("axes")
        if given is None and len(node.input) > 1 and node.input[1]:
            constant = self._constants.get(node.input[1])
            given = () if constant is None else self._onnx.numpy_helper.to_array(constant)
            default = default if constant is not None else ()
        axes = np.ravel(given).tolist() if given is not None else []
        return {int(one) % rank for one in axes or default} if rank else set()

    def _moved(
        self, node: Any, place: int, result: tuple[int, _Shape], options: Mapping[str, Any]
    ) -> int | None:
        """Return the axis of a result on which the samples of an input are."""
        name = node.input[place]
        before, (output, after) = self._shapes[name] or (), result
        axis, kind, rank = self._axis[name], node.op_type, len(before)
        if kind == "Transpose":
            return list(options.get("perm", range(rank)[::-1])).index(axis)
        if kind in ("Reshape", "Flatten"):
            return _reshaped(axis, before, after)
        if kind == "Unsqueeze":
            added = self._listed(node, options, len(after), ())
            kept = [one for one in range(len(after)) if one not in added]
            return kept[axis] if len(kept) == rank else None
        if kind in ("LSTM", "GRU", "RNN"):
            return 0 if options.get("layout") else 2 - (output > 0)
        if kind == "Gather":
            data, chosen = (len(self._shapes.get(one) or ()) for one in node.input)
            along = int(options.get("axis", 0)) % max(data, 1)
            return along + axis if place else axis + (chosen - 1) * (axis > along)
        if kind == "Gemm" and place < 2:
            return place
        if kind == "Squeeze" or (kind.startswith(("Reduce", "Arg")) and not options.get("keepdims", 1)):
            ones = [one for one, size in enumerate(before) if size == 1]
            squeezed = kind == "Squeeze"
            gone = self._listed(node, options, rank, ones) if squeezed else self._along(node, 0, options)
            known = axis not in gone and len(gone) == rank - len(after)
            return axis - sum(one < axis for one in gone) if known else None
        widest = max(len(self._shapes.get(one) or ()) for one in node.input)
        return axis + len(after) - rank if len(after) == widest else None


def _reshaped(axis: int, before: _Shape, after: _Shape) -> int | None:
    """Return the only axis of this size that has as many elements in front of it."""
    found = [
        one
        for one, size in enumerate(after)
        if size == before[axis] and math.prod(after[:one]) == math.prod(before[:axis])
    ]
    return found[0] if len(found) == 1 else None
