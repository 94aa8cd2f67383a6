"""`read_onnx`: the layers of an ONNX file, with costs by a table of operators; without torch.

Floating initializers of two or more elements are trained parameters, but for the statistics of batch norms.
Kept activations are those that torch keeps for the gradients of these operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from weft.capture.graphs.joining import common_path, joined, unused_name
from weft.capture.graphs.onnx_operators import KNOWN, OnnxOperator, OnnxOperators
from weft.capture.graphs.onnx_values import FLOATING, OnnxValues, words_of
from weft.capture.graphs.sample_axes import SampleAxes, SamplesAt
from weft.describe.amount import Amount
from weft.describe.families.transformer import passes
from weft.describe.layer import Layer, Matmul, distinct_kinds
from weft.describe.layer_graph import LayerGraph, TiedParameters
from weft.errors import InputError, Violation
from weft.installed import remedy

_ELEMENT_BYTES = {2: 1, 3: 1, 6: 4, 7: 8, 9: 1}


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
    """A file whose operators have known costs and keep samples apart."""

    def __init__(self, path: Path) -> None:
        self._values = OnnxValues(path)
        self._operators = OnnxOperators(self._values)
        self._values.complete()
        values = self._values
        self._places = SampleAxes(values.model, values.shapes, values.inputs, values.samples, KNOWN)
        for node in values.graph.node:
            if (problem := self._places.problem(node)) is not None:
                raise values.refuse(f"{words_of(node)} {problem}")

    def layers(self, level: str) -> LayerGraph:
        """Return the layers of a level."""
        values, first = self._values, self._values.inputs[0]
        result, operators, reads = self._needed()
        keys = [one.key(level) for one in operators]
        groups = joined(reads, (), None if level == "operator" else keys)
        layer_of = {node: index for index, group in enumerate(groups) for node in group}
        edges = {(layer_of[one], layer_of[node]) for node in layer_of for one in reads[node]}
        inputs = {(number, layer_of[node]) for node in layer_of for number in operators[node].inputs}
        users: dict[str, set[int]] = {}
        for node, layer in layer_of.items():
            for name in operators[node].parameters:
                users.setdefault(name, set()).add(layer)
        owned = [[name for name, used in users.items() if min(used) == index] for index in range(len(groups))]
        kept: set[str] = set()
        taken: set[str] = set()
        layers = [
            self._layer([operators[node] for node in group], own, kept, taken, level)
            for group, own in zip(groups, owned, strict=True)
        ]
        tokens = values.kinds[first] not in FLOATING and len(values.shape(first)) > 1
        return LayerGraph(
            name=Path(values.where).stem,
            layers=distinct_kinds(layers),
            edges=tuple(sorted(one for one in edges if one[0] != one[1])),
            sequence=values.shape(first)[1] if tokens else 1,
            vocabulary=values.shape(result)[-1],
            inputs=tuple(sorted(inputs)),
            tied=tuple(
                TiedParameters(tuple(sorted(used)), Amount.of(values.weights[name]))
                for name, used in users.items()
                if len(used) > 1
            ),
        )

    def _needed(self) -> tuple[str, list[OnnxOperator], list[tuple[int, ...]]]:
        """Return the result, the operators that it follows from, and those that each of them reads."""
        values, ends = self._values, [one.name for one in self._values.graph.output]
        needed = self._operators.leading_to(ends[0]) if len(ends) == 1 else []
        if not needed:
            raise values.refuse(f"{len(ends)} results; needed: one, which follows from inputs and parameters")
        shape = values.shape(ends[0])
        if shape[:1] != (values.samples,) or self._places.get(ends[0]) not in (None, SamplesAt(0)):
            raise values.refuse(f"result {ends[0]} of shape {list(shape)} has no samples on its first axis")
        operators = [self._operators.all[number] for number in needed]
        place = {number: index for index, number in enumerate(needed)}
        return ends[0], operators, [tuple(place[one] for one in operator.reads) for operator in operators]

    def _layer(
        self,
        operators: Sequence[OnnxOperator],
        own: Sequence[str],
        kept: set[str],
        taken: set[str],
        level: str,
    ) -> Layer:
        """Return the costs of a layer with its own parameters.

        Tensors that layers before it keep, and names that they have, count there; it adds its own.
        """
        values, costs = self._values, self._operators
        weights, products, tensors = list[Matmul](), list[Matmul](), list[str]()
        elements, kernels, steps = 0.0, 0, sum(map(costs.step_elements, operators))
        for one in operators:
            of_weights, of_values = costs.products(one)
            weights += of_weights
            products += of_values
            if not of_weights and not of_values:
                elements += costs.touched(one)
                kernels += 1
            tensors += [name for name in costs.kept(one) if name not in kept]
            kept |= set(tensors)
        # Each vector inside a step is written and read once.
        elements += 2.0 * steps
        sizes = [(values.kinds[name], values.elements(name)) for name in dict.fromkeys(tensors)]
        floating = steps + sum(size for kind, size in sizes if kind in FLOATING)
        other_bytes = sum(_ELEMENT_BYTES.get(kind, 8) * size for kind, size in sizes if kind not in FLOATING)
        parameters = Amount.of(sum(values.weights[name] for name in own))
        kinds = list(dict.fromkeys(one.kind.lower() for one in operators))
        kind = "+".join(kinds[:3]) + ("+..." if len(kinds) > 3 else "")
        path = common_path([one.key(level) for one in operators])
        plain = level == "operator" or not path

        def of_samples(count: float) -> Amount:
            return Amount.of(count / values.samples, batch=1)

        return Layer(
            name=unused_name(".".join(filter(None, (path, kind))) if plain else path, taken),
            kind=kind,
            parameters=parameters,
            kept=of_samples(floating),
            kept_bytes=of_samples(other_bytes),
            sent=of_samples(values.elements(operators[-1].node.output[0])),
            **passes(weights, products, memory=of_samples(elements), kernels=kernels, parameters=parameters),
        )
