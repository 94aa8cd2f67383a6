"""The operators of an exported graph by their results: values that layers send each other, views, neither.

An operator that depends on samples and on trained parameters is a **core** operator: it belongs to one layer.
A **view** of its result costs nothing; every reader repeats it. All others are **local**: sizes, positions,
masks and whatever follows from inputs or parameters alone. Every layer computes them again.

A value can leave its layer under three conditions. Samples are on exactly one of its axes. Its type is that
of the computations. Gradients flow through it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from weft.capture.graphs.exported import ExportedModule, place
from weft.capture.model_arguments import BUILD
from weft.errors import InputError, Violation

_aten = torch.ops.aten
# They check what the export has found out, and compute nothing.
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range_for_size")
_CUT = (_aten.detach.default,)
# With weights that are not trained, a layer would repeat them for nothing.
_PRODUCTS = ("linear", "conv1d", "conv2d", "conv3d", "matmul", "bmm", "addmm", "mm", "lstm", "gru")


@dataclass(frozen=True)
class Values:
    """The operators of a graph by what they compute.

    Attributes:
        exported: the graph.
        core: the core operators, in their order.
        base: for each core operator itself, for each view the core operator whose result it shows.
        axis: for every value that can leave its layer, the axis of the samples.
        together: pairs of core operators that must be in one layer.
    """

    exported: ExportedModule
    core: tuple[Node, ...]
    base: dict[Node, Node]
    axis: dict[Node, int]
    together: tuple[tuple[Node, Node], ...]

    def border(self, node: Node) -> Node | None:
        """Return the value that a reader of a view, or of a core operator, receives; None if it cannot."""
        found = None if node is self.base[node] else self.border(_shown(node, self.base))
        return node if found is None and node in self.axis else found

    def read(self, node: Node) -> Iterator[Node]:
        """Yield the core operators and views that a core operator reads, also through local operators."""
        seen: set[Node] = set()
        waiting = list(node.all_input_nodes)
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in self.base:
                yield one
            elif one.op == "call_function" and not is_size(one):
                waiting += one.all_input_nodes


def is_size(node: Node) -> bool:
    """Return True for a size or another number that the export has as an expression of the batch."""
    return isinstance(
        node.meta.get("val"), torch.SymInt | int | torch.SymFloat | float | torch.SymBool | bool
    )


def _shown(node: Node, base: dict[Node, Node]) -> Node:
    return next(one for one in node.all_input_nodes if one in base)


@dataclass
class _SortedNodes:
    samples: set[Node] = field(default_factory=set)
    graded: set[Node] = field(default_factory=set)
    base: dict[Node, Node] = field(default_factory=dict)
    core: list[Node] = field(default_factory=list)
    together: list[tuple[Node, Node]] = field(default_factory=list)


def values_of(exported: ExportedModule) -> Values:
    """Sort the operators of an exported graph, which loses checks and results that nobody reads.

    Raises:
        InputError: when an operator changes an input or a buffer, mixes samples, or has frozen weights in
            front of all trained ones.
    """
    _tidy(exported.graph)
    found = _SortedNodes()
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            value = exported.tensors.get(node.name)
            if value is None:
                found.samples.add(node)
            elif value[1].requires_grad:
                found.graded.add(node)
        elif node.op == "call_function":
            _refuse_changes(node, exported)
            _sort(node, found)
    values = Values(exported, tuple(found.core), found.base, {}, tuple(found.together))
    batch = _batch(exported)
    for node in found.base:
        if node not in found.graded:
            continue
        _refuse_mixing(node)
        axis = _axis(node, batch, exported.dtype)
        if axis is not None:
            values.axis[node] = axis
    return _with_ties(values)


def _tidy(graph: torch.fx.Graph) -> None:
    """Let readers after an in-place operator read its result, and remove checks and unread operators."""
    for node in list(graph.nodes):
        if node.op == "call_function" and plain_name(node) in _CHECKS:
            graph.erase_node(node)
        elif (changed := _changed(node)) is not None:
            changed.replace_all_uses_with(node, delete_user_cb=_after(node).__contains__)
    graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output") or _is_kept(node)
    )


def _is_kept(node: Node) -> bool:
    return _changed(node) is not None


def _after(node: Node) -> set[Node]:
    found, one = set(), node.next
    while one.op != "root":
        found.add(one)
        one = one.next
    return found


def _changed(node: Node) -> Node | None:
    """Return the tensor that an operator changes in place."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return None
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Node):
            return value
    return None


def plain_name(node: Node) -> str:
    """Return the name of an operator in torch, without its overload."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def operator_name(node: Node) -> str:
    """Return the plain name of an operator, such as `linear`."""
    return plain_name(node).strip("_").replace("scaled_dot_product_attention", "attention")


def _refuse_changes(node: Node, exported: ExportedModule) -> None:
    changed = _changed(node)
    if changed is not None and changed.op == "placeholder":
        name = exported.tensors[changed.name][0] if changed.name in exported.tensors else "an input"
        problem = f"the module changes {name} while it runs ({place(node)})"
        raise InputError(
            Violation(BUILD, problem, "a batch norm in eval()" if "batches_tracked" in name else "")
        )
    training = {"batch_norm": 5, "native_batch_norm": 5, "instance_norm": 5}.get(plain_name(node))
    if training is not None and node.args[training] and isinstance(node.args[3], Node):
        problem = f"a norm of batches changes its state while it runs ({place(node)})"
        raise InputError(Violation(BUILD, problem, "a batch norm in eval()"))


def _sort(node: Node, found: _SortedNodes) -> None:
    read = node.all_input_nodes
    if is_size(node):
        return
    samples = any(one in found.samples for one in read if not is_size(one))
    graded = any(one in found.graded for one in read if not is_size(one)) and node.target not in _CUT
    cores = [one for one in read if one in found.base]
    if samples:
        found.samples.add(node)
    if graded and _is_floating(node.meta.get("val")):
        found.graded.add(node)
    if cores and _is_view(node):
        found.base[node] = found.base[cores[0]]
    elif cores or (samples and node in found.graded):
        found.base[node] = node
        found.core.append(node)
        changed = _changed(node)
        if changed is not None:
            _keep_readers(node, changed, found)
    elif samples and plain_name(node) in _PRODUCTS and _has_frozen(node):
        problem = f"{plain_name(node)} has frozen weights and nothing before it is trained ({place(node)})"
        raise InputError(Violation(BUILD, problem))


def _has_frozen(node: Node) -> bool:
    return any(one.op == "placeholder" and one.name.startswith("p_") for one in node.all_input_nodes)


def _keep_readers(node: Node, changed: Node, found: _SortedNodes) -> None:
    """Note that an in-place operator and all who read the tensor before it are in one layer."""
    if changed not in found.base:
        return
    base = found.base[changed]
    found.together.append((base, node))
    for one in found.core:
        if any(found.base.get(read) is base for read in one.all_input_nodes):
            found.together.append((one, node))


def _is_floating(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, tuple | list) and any(map(_is_floating, value))


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if plain_name(node) in ("dropout", "feature_dropout", "alpha_dropout"):
        return not node.args[1] or not node.args[2]
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(one.alias_info is not None for one in schema.returns)


def _refuse_mixing(node: Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not any(isinstance(size, torch.SymInt) for size in value.shape):
        problem = f"{plain_name(node)} mixes the samples of a batch ({place(node)}); no split of it is equal"
        raise InputError(Violation(BUILD, problem))


def _batch(exported: ExportedModule) -> Any:
    """Return the symbol of the batch."""
    first = next(node for node in exported.graph.nodes if node.name == exported.inputs[0])
    return _expression(first.meta["val"].shape[0])


def _expression(size: Any) -> Any:
    """Return a size as an expression of the batch; None if it does not depend on it."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def _axis(node: Node, batch: Any, dtype: torch.dtype) -> int | None:
    """Return the only axis whose size depends on the batch, if it is the batch itself."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype is not dtype:
        return None
    sizes = [_expression(size) for size in value.shape]
    depending = [axis for axis, size in enumerate(sizes) if size is not None]
    return depending[0] if len(depending) == 1 and sizes[depending[0]] == batch else None


def _with_ties(values: Values) -> Values:
    """Return the values with all core operators tied that read something which cannot leave its layer."""
    ties = list(values.together)
    for node in values.core:
        for one in values.read(node):
            if values.border(one) is None:
                ties.append((values.base[one], node))
    return Values(values.exported, values.core, values.base, values.axis, tuple(ties))
