"""`SampleAxes`: where the samples of each value in an ONNX file are, and the operators that mix samples.

Samples are followed from the inputs on, operator by operator, without torch. A view may join their axis with
others, and split it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_Shape = tuple[int, ...]

# Operators that combine, or choose, elements along one axis: the attribute that names it, and its default.
_ALONG = {
    "ArgMax": ("axis", 0),
    "ArgMin": ("axis", 0),
    "Concat": ("axis", 0),
    "Gather": ("axis", 0),
    "LogSoftmax": ("axis", -1),
    "LpNormalization": ("axis", -1),
    "Softmax": ("axis", -1),
    "Split": ("axis", 0),
    "TopK": ("axis", -1),
}
# Those that do so along all axes from one on.
_FROM = {
    "AveragePool": ("", 2),
    "Conv": ("", 1),
    "ConvTranspose": ("", 1),
    "GlobalAveragePool": ("", 2),
    "GlobalMaxPool": ("", 2),
    "GroupNormalization": ("", 1),
    "InstanceNormalization": ("", 2),
    "LayerNormalization": ("axis", -1),
    "LRN": ("", 1),
    "MaxPool": ("", 2),
    "RMSNormalization": ("axis", -1),
    "SimplifiedLayerNormalization": ("axis", -1),
}
_RECURRENT = ("GRU", "LSTM", "RNN")
_FLATTENING_SOFTMAX = 13  # Before this version of operators, Softmax has 1 as its default.

MIXES = "mixes the samples of a batch; no split of it is equal"
HIDES = "leaves the samples of a batch on no axis that weft can follow"


class SamplesAt(NamedTuple):
    """An axis with samples: `inner` elements of one lie side by side, then those of the next."""

    axis: int
    inner: int = 1


class SampleAxes:
    """The places of samples, by the name of a value.

    Args:
        model: the file.
        shapes: of each value; None: unknown.
        inputs: names of the values that have samples on axis 0.
        samples: the size of a batch. With one sample, no view tells where it is for sure.
        followed: kinds of operators behind which samples must be found.
    """

    def __init__(
        self,
        model: Any,
        shapes: Mapping[str, _Shape | None],
        inputs: Sequence[str],
        samples: int,
        followed: Sequence[str],
    ) -> None:
        import onnx

        self._onnx, self._shapes, self._samples, self._followed = onnx, shapes, samples, followed
        self._version = max((one.version for one in model.opset_import if not one.domain), default=0)
        self._constants = {one.name: one for one in model.graph.initializer} | {
            node.output[0]: one.t
            for node in model.graph.node
            for one in node.attribute
            if node.op_type == "Constant" and one.name == "value"
        }
        self._place = {name: SamplesAt(0) for name in inputs if (shapes[name] or (0,))[0] == samples}

    def get(self, name: str) -> SamplesAt | None:
        """Return the place of samples in a value; None: it has none, or their place is unknown."""
        return self._place.get(name)

    def problem(self, node: Any) -> str | None:
        """Return why samples stay not apart behind an operator; None if they do, and note their places."""
        options = {one.name: self._onnx.helper.get_attribute_value(one) for one in node.attribute}
        read = {place: name for place, name in enumerate(node.input) if name in self._place}
        if any(self._place[name].axis in self._along(node, place, options) for place, name in read.items()):
            return MIXES
        for number, name in enumerate(node.output):
            after = self._shapes.get(name)
            if not read or after is None or node.op_type in ("Shape", "Size"):
                continue
            moved = [self._moved(node, one, (number, after), options) for one in read]
            found = {one for one in moved if one is not None}
            if len(found) > 1:
                return MIXES
            if found:
                self._place[name] = found.pop()
            elif self._samples > 1 and node.op_type in self._followed:
                return HIDES
        return None

    def _along(self, node: Any, place: int, options: Mapping[str, Any]) -> set[int]:
        """Return the axes of an input along which an operator combines, or chooses, elements."""
        rank, kind = len(self._shapes[node.input[place]] or ()), node.op_type
        if kind.startswith("Reduce"):
            return self._listed(
                node, options, rank, range(0 if options.get("noop_with_empty_axes") else rank)
            )
        if kind == "CumSum":
            return self._listed(node, options, rank, ())
        if kind == "Gemm" and place < 2:
            return {1 - place if not options.get("transB" if place else "transA") else place}
        if kind == "MatMul":
            return {max(rank - 2, 0) if place else rank - 1}
        if not rank or (place and kind != "Concat"):
            return set()
        if kind in _RECURRENT:
            return {1 if options.get("layout") else 0, 2}
        if kind in _FROM:
            name, first = _FROM[kind]
            return set(range(options.get(name, first) % rank if rank > 1 else 0, rank))
        if kind not in _ALONG:
            return set()
        name, default = _ALONG[kind]
        if "Softmax" in kind and self._version < _FLATTENING_SOFTMAX:
            default = 1
        return {options.get(name, default) % rank}

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
    ) -> SamplesAt | None:
        """Return the place in a result of the samples of an input."""
        before, at = self._shapes[node.input[place]] or (), self._place[node.input[place]]
        if node.op_type in ("Reshape", "Flatten"):
            return _reshaped(at, self._samples, before, result[1])
        axis = self._moved_axis(node, place, result, options)
        kept = axis is not None and result[1][axis : axis + 1] == before[at.axis : at.axis + 1]
        return SamplesAt(axis, at.inner) if axis is not None and kept else None

    def _moved_axis(
        self, node: Any, place: int, result: tuple[int, _Shape], options: Mapping[str, Any]
    ) -> int | None:
        """Return the axis of a result that was the axis with samples of an input."""
        name = node.input[place]
        before, (output, after) = self._shapes[name] or (), result
        axis, kind, rank = self._place[name].axis, node.op_type, len(before)
        if kind == "Transpose":
            return list(options.get("perm", range(rank)[::-1])).index(axis)
        if kind == "Unsqueeze":
            added = self._listed(node, options, len(after), ())
            kept = [one for one in range(len(after)) if one not in added]
            return kept[axis] if len(kept) == rank else None
        if kind in _RECURRENT:
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
        ranks = [len(self._shapes.get(one) or ()) for one in node.input]
        if kind == "MatMul" and 1 in ranks:
            # Of a product with a vector, the other's last axis, or its last but one, is gone.
            return axis - (place == 1 and axis == rank - 1)
        return axis + len(after) - rank if kind == "Expand" or len(after) == max(ranks) else None


def _reshaped(at: SamplesAt, samples: int, before: _Shape, after: _Shape) -> SamplesAt | None:
    """Return the only place of samples behind a view: as far apart as before, among elements in a row.

    A sample alone may be on any axis of size 1; then the only such axis counts.
    """
    apart = at.inner * math.prod(before[at.axis + 1 :])
    found = []
    for axis, size in enumerate(after):
        inside = math.prod(after[axis + 1 :])
        if inside and apart % inside == 0 and size * inside % (apart * samples) == 0:
            found.append(SamplesAt(axis, apart // inside))
    alone = [one for one in found if after[one.axis] == samples]
    best = alone if samples == 1 and alone else found
    return best[0] if len(best) == 1 else None
