"""`OperatorPiece`: the operators of one layer as a graph of their own, from tensors to one tensor.

A piece reads inputs of a sample, then one tensor of each layer that it reads. All have the samples on the
first axis. A layer that gives several values joins them in one tensor, which its readers split again. Local
operators and views are repeated. Sizes with the batch follow from the first tensor. The type of computations
is that of the layer's first parameter, or of the first value of another layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from weft.capture.graphs.exported import place
from weft.capture.graphs.levels import OperatorGroup
from weft.capture.graphs.values import Values, is_size, plain_name
from weft.capture.model_arguments import BUILD
from weft.errors import InputError, Violation

# Operators that draw random numbers, and the place of the probability in their arguments.
_DROPS = {
    "dropout": 1,
    "feature_dropout": 1,
    "alpha_dropout": 1,
    "lstm": 5,
    "gru": 5,
    "rnn_tanh": 5,
    "rnn_relu": 5,
}
_DROPS["scaled_dot_product_attention"] = 4
# Numbers beyond this are the lowest or largest of fp64; those of the computations take their place.
_LARGEST = torch.finfo(torch.float32).max


class DropoutOperator(nn.Module):
    """An operator that drops elements with probability `p` in training alone.

    Args:
        target: the operator, whose argument at `place` is the probability.
    """

    def __init__(self, target: Callable[..., Any], place: int, p: float) -> None:
        super().__init__()
        self.target, self.place, self.p = target, place, p

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if not self.training:
            arguments = (*arguments[: self.place], 0.0, *arguments[self.place + 1 :])
        return self.target(*arguments, **options)


@dataclass(frozen=True)
class OperatorPiece:
    """One layer.

    Attributes:
        graph: from the tensors that it reads to the one that it gives.
        inputs: numbers of the inputs of a sample that it reads, rising.
        reads: positions of the layers that it reads, rising.
        tensors: its parameters and buffers, by their names in the user's module.
        drops: by name, the operators that drop elements in training.
    """

    graph: Graph
    inputs: tuple[int, ...]
    reads: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]
    drops: Mapping[str, DropoutOperator]

    def module(self, tensors: Mapping[str, torch.Tensor]) -> GraphModule:
        """Return a module with these parameters and buffers in the place of the user's."""
        root: dict[str, Any] = {name: tensors[name] for name in self.tensors} | dict(self.drops)
        return GraphModule(root, self.graph, "OperatorPiece")


@dataclass(frozen=True)
class _Value:
    """A value inside the tensor that its layer gives: its layer, and its elements of a sample."""

    layer: int
    begin: int
    shape: tuple[int, ...]
    alone: bool

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def pieces_of(values: Values, groups: Sequence[OperatorGroup]) -> list[OperatorPiece]:
    """Cut the graph into layers.

    Raises:
        InputError: when an operator has sizes that are no multiples of the batch, or nothing is trained.
    """
    layer_of = {node: index for index, group in enumerate(groups) for node in group.nodes}
    result = _result(values.exported.graph)
    if result not in values.base:
        raise InputError(Violation(BUILD, "no trained parameter changes the result"))
    given: list[list[Node]] = [[] for _ in groups]
    for node in values.core:
        for one in values.read(node):
            border = values.border(one)
            owner = layer_of[values.base[one]]
            if owner != layer_of[node] and border is not None and border not in given[owner]:
                given[owner].append(border)
    last = layer_of[values.base[result]]
    if result not in values.axis:
        raise InputError(
            Violation(BUILD, "the result must be a floating tensor with the samples on one axis")
        )
    given[last] = [result]
    places = {
        node: value
        for layer, nodes in enumerate(given)
        for node, value in zip(nodes, _values(layer, nodes, values), strict=True)
    }
    order = {node: index for index, node in enumerate(values.exported.graph.nodes)}
    return [
        _Cut(values, layer_of, places, order, index).piece(group.nodes, given[index])
        for index, group in enumerate(groups)
    ]


def _result(graph: Graph) -> Node:
    """Return the operator whose result is that of the graph."""
    output: Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    [result] = output.all_input_nodes
    return result


def _values(layer: int, nodes: Sequence[Node], values: Values) -> list[_Value]:
    found, begin = [], 0
    for node in nodes:
        sizes = list(node.meta["val"].shape)
        del sizes[values.axis[node]]
        one = _Value(layer, begin, tuple(map(int, sizes)), len(nodes) == 1)
        begin += one.elements
        found.append(one)
    return found


class _Cut:
    """The making of one piece."""

    def __init__(
        self,
        values: Values,
        layer_of: Mapping[Node, int],
        places: Mapping[Node, _Value],
        order: Mapping[Node, int],
        layer: int,
    ) -> None:
        self._values, self._layer_of, self._places, self._layer = values, layer_of, places, layer
        self._exported, self._order = values.exported, order
        self._graph = Graph()
        self._made: dict[Node, Node] = {}
        self._sizes: dict[Any, Node | int] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._first: Node
        self._like: Node
        self._facts: dict[str, Node] = {}
        self._drops: dict[str, DropoutOperator] = {}

    def piece(self, own: Sequence[Node], gives: Sequence[Node]) -> OperatorPiece:
        needed, reads, inputs, tensors = self._needed([*own, *gives])
        graph, numbers = self._graph, {name: number for number, name in enumerate(self._exported.inputs)}
        samples = sorted(inputs, key=lambda node: numbers[node.name])
        layers = sorted({self._places[node].layer for node in reads})
        placed = [graph.placeholder(f"input_{numbers[node.name]}") for node in samples]
        values = {layer: graph.placeholder(f"value_{layer}") for layer in layers}
        self._first = [*placed, *values.values()][0]
        self._made |= dict(zip(samples, placed, strict=True))
        names: dict[int, str] = {}
        for node in tensors:
            name, tensor = self._exported.tensors[node.name]
            name = names.setdefault(id(tensor), name)
            self._tensors[name] = tensor
            self._made[node] = graph.get_attr(name)
        trained = [self._made[node] for node in tensors if self._tensor(node).requires_grad]
        self._like = [*trained, *values.values(), self._first][0]
        for node in reads:
            self._made[node] = self._split(values[self._places[node].layer], node)
        for node in needed:
            self._made[node] = self._copied(node)
        graph.output(self._joined(gives))
        graph.eliminate_dead_code(is_impure_node=_changes)
        graph.lint()
        used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        kept = {name: tensor for name, tensor in self._tensors.items() if name in used}
        return OperatorPiece(
            graph, tuple(numbers[node.name] for node in samples), tuple(layers), kept, self._drops
        )

    def _tensor(self, node: Node) -> torch.Tensor:
        return self._exported.tensors[node.name][1]

    def _needed(self, waiting: list[Node]) -> tuple[list[Node], list[Node], list[Node], list[Node]]:
        """Return operators to copy, values of other layers, inputs of samples, and parameters and buffers."""
        needed: set[Node] = set()
        reads: dict[Node, None] = {}
        leaves: dict[Node, None] = {}
        while waiting:
            node = waiting.pop()
            if node in needed or node in reads or node in leaves or is_size(node):
                continue
            base = self._values.base.get(node)
            if node.op == "placeholder":
                leaves[node] = None
            elif (
                base is not None and self._layer_of[base] != self._layer and self._values.border(node) is node
            ):
                reads[node] = None
            else:
                needed.add(node)
                waiting += node.all_input_nodes
        names, order = set(self._exported.inputs), self._order.__getitem__
        placeholders = sorted(leaves, key=order)
        return (
            sorted(needed, key=order),
            sorted(reads, key=order),
            [node for node in placeholders if node.name in names],
            [node for node in placeholders if node.name not in names],
        )

    def _split(self, tensor: Node, node: Node) -> Node:
        value, call = self._places[node], self._graph.call_function
        if not value.alone:
            tensor = call(torch.narrow, (tensor, 1, value.begin, value.elements))
            tensor = call(torch.unflatten, (tensor, 1, value.shape))
        axis = self._values.axis[node]
        return call(torch.movedim, (tensor, 0, axis)) if axis else tensor

    def _joined(self, gives: Sequence[Node]) -> Node:
        call = self._graph.call_function
        moved = [
            call(torch.movedim, (self._made[node], axis, 0))
            if (axis := self._values.axis[node])
            else self._made[node]
            for node in gives
        ]
        if len(moved) == 1:
            return moved[0]
        return call(torch.cat, ([call(torch.flatten, (one, 1)) for one in moved], 1))

    def _copied(self, node: Node) -> Node:
        # Typed loosely: torch types arguments by all that they may be.
        target: Any = node.target
        args, kwargs = (self._arguments(one, node) for one in (node.args, node.kwargs))
        if self._makes_values(node):
            kwargs = {**kwargs, "dtype": self._fact("dtype")}
        at = _DROPS.get(plain_name(node))
        chance: Any = node.args[at] if at is not None and len(node.args) > at else 0.0
        if at is not None and chance:
            name = f"dropout_{len(self._drops)}"
            self._drops[name] = DropoutOperator(target, at, chance)
            made = self._graph.call_module(name, args, kwargs)
        else:
            made = self._graph.call_function(target, args, kwargs)
        made.meta = {"stack_trace": node.meta.get("stack_trace")}
        return made

    def _arguments(self, given: Any, node: Node) -> Any:
        return map_aggregate(given, lambda value: self._argument(value, node))

    def _makes_values(self, node: Node) -> bool:
        """Return True for an operator that reads no tensor and makes one with the type of computations."""
        value, schema = node.meta.get("val"), getattr(node.target, "_schema", None)
        if schema is None or not isinstance(value, torch.Tensor) or value.dtype is not self._exported.dtype:
            return False
        typed = any(one.name == "dtype" for one in schema.arguments)
        return typed and all(map(is_size, node.all_input_nodes))

    def _argument(self, value: Any, node: Node) -> Any:
        """Return an operator's argument in this piece."""
        if isinstance(value, Node):
            return self._size(value.meta["val"], node) if is_size(value) else self._made[value]
        if isinstance(value, torch.device):
            return self._fact("device")
        if value is self._exported.dtype:
            return self._fact("dtype")
        if isinstance(value, float) and _LARGEST < abs(value) < math.inf:
            return self._graph.call_function(largest, (self._fact("dtype"), value > 0))
        return value

    def _fact(self, name: str) -> Node:
        if name not in self._facts:
            source = self._like if name == "dtype" else self._first
            self._facts[name] = self._graph.call_function(getattr, (source, name))
        return self._facts[name]

    def _size(self, value: Any, node: Node) -> Node | int | float | bool:
        """Return a size as a multiple of the samples in the first tensor."""
        if not isinstance(value, torch.SymInt):
            if isinstance(value, torch.SymFloat | torch.SymBool):
                raise InputError(Violation(BUILD, f"a number follows from the batch ({place(node)})"))
            number: int | float | bool = value
            return number
        expression = value.node.expr
        if expression.is_Integer:
            return int(expression)
        if expression not in self._sizes:
            [*symbols] = expression.free_symbols
            factor = expression / symbols[0]
            if len(symbols) != 1 or not factor.is_Integer:
                problem = f"the size {expression} is no multiple of the batch ({place(node)})"
                raise InputError(Violation(BUILD, problem))
            call = self._graph.call_function
            samples = self._sizes.setdefault(symbols[0], call(torch.ops.aten.sym_size.int, (self._first, 0)))
            self._sizes[expression] = samples if factor == 1 else call(_times, (samples, int(factor)))
        return self._sizes[expression]


def largest(dtype: torch.dtype, positive: bool) -> float:
    """Return the largest number of a type, or the lowest."""
    limits = torch.finfo(dtype)
    return limits.max if positive else limits.min


def _times(samples: int, factor: int) -> int:
    return samples * factor


def _changes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op in ("placeholder", "output") or (schema is not None and schema.is_mutable)


def run_piece(
    piece: OperatorPiece, tensors: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Run a piece operator by operator, without generating code for it."""
    made: dict[Node, Any] = {}
    waiting = iter(inputs)
    look_up: Callable[[Node], Any] = made.__getitem__
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            made[node] = next(waiting)
        elif node.op == "get_attr":
            made[node] = tensors[str(node.target)]
        elif node.op in ("call_function", "call_module"):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), look_up)
            target = piece.drops[str(node.target)] if node.op == "call_module" else node.target
            try:
                made[node] = target(*args, **kwargs)
            except InputError as error:
                raise InputError(Violation(BUILD, f"{error.violations[0].problem} ({place(node)})")) from None
        else:
            result: torch.Tensor = made[node.args[0]]
    return result
