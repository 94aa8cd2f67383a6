"""Groups of operators that become layers: single operators, leaf modules, or blocks.

Operators that must be together are one from the start, with everything on a path between them. Then they are
taken in order. Each joins the newest layer of its module, or of its block. If that would close a cycle of
layers, it begins another layer of the same module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import rustworkx
from torch import nn
from torch.fx import Node

from weft.capture.graphs.exported import module_path
from weft.capture.graphs.subject import LEVELS
from weft.capture.graphs.values import Values, operator_name
from weft.errors import require_choice


@dataclass(frozen=True)
class OperatorGroup:
    """Core operators of one layer, in order; `kind` is that of the module, or the operator."""

    name: str
    kind: str
    nodes: tuple[Node, ...]


def groups_of(values: Values, level: str) -> list[OperatorGroup]:
    """Return the layers of a level in a topological order, in which the last one gives the output.

    Raises:
        InputError: for an unknown level.
    """
    require_choice("level", level, LEVELS)
    position = {node: index for index, node in enumerate(values.core)}
    reads = [sorted({position[values.base[one]] for one in values.read(node)}) for node in values.core]
    together = [(position[one], position[other]) for one, other in values.together]
    paths = _block_paths(values.exported.modules) if level == "block" else None
    keys = None if level == "operator" else [_key(node, paths) for node in values.core]
    ordered = joined(reads, together, keys)
    return _named([[values.core[one] for one in group] for group in ordered], level, values, paths)


def joined(
    reads: Sequence[Sequence[int]], together: Iterable[tuple[int, int]], keys: Sequence[str] | None
) -> list[list[int]]:
    """Return the operators of each layer, in a topological order of layers.

    Args:
        reads: the operators that each operator reads, which stand before it.
        together: pairs of operators that are in one layer.
        keys: for each operator, its module; None: no operators join but those together.
    """
    atom_of = _atoms(reads, together)
    atoms: dict[int, list[int]] = {}
    for node, atom in enumerate(atom_of):
        atoms.setdefault(atom, []).append(node)
    members = list(atoms.values()) if keys is None else _by_key(reads, atoms, atom_of, keys)
    return _in_order(reads, members)


def _atoms(reads: Sequence[Sequence[int]], together: Iterable[tuple[int, int]]) -> list[int]:
    """Return for each operator the first of those that it cannot leave: ties, and paths between tied ones."""
    graph = rustworkx.PyDiGraph()
    graph.add_nodes_from(range(len(reads)))
    graph.add_edges_from_no_data([(one, node) for node, read in enumerate(reads) for one in read])
    graph.add_edges_from_no_data([pair for one, other in together for pair in ((one, other), (other, one))])
    atom = [0] * len(reads)
    for component in rustworkx.strongly_connected_components(graph):
        for node in component:
            atom[node] = min(component)
    return atom


def _by_key(
    reads: Sequence[Sequence[int]],
    atoms: Mapping[int, Sequence[int]],
    atom_of: Sequence[int],
    keys: Sequence[str],
) -> list[list[int]]:
    """Return the operators of each layer, with atoms of one key together where that closes no cycle."""
    order = _topological(atoms, reads, atom_of)
    members: list[list[int]] = []
    before: list[int] = []  # For each layer, a bit for every layer that it depends on.
    newest: dict[str, int] = {}
    layer_of: dict[int, int] = {}
    for atom in order:
        needed = {
            layer_of[atom_of[one]] for node in atoms[atom] for one in reads[node] if atom_of[one] != atom
        }
        key = _common([keys[node] for node in atoms[atom]])
        layer = newest.get(key)
        if layer is None or any(before[one] >> layer & 1 for one in needed - {layer}):
            layer = newest[key] = len(members)
            members.append([])
            before.append(0)
        layer_of[atom] = layer
        members[layer] += atoms[atom]
        added = 0
        for one in needed - {layer}:
            added |= before[one] | 1 << one
        if added & ~before[layer]:
            before[layer] |= added
            for later, bits in enumerate(before):
                if bits >> layer & 1:
                    before[later] = bits | before[layer]
    return [sorted(group) for group in members]


def _topological(
    atoms: Mapping[int, Sequence[int]], reads: Sequence[Sequence[int]], atom_of: Sequence[int]
) -> list[int]:
    """Return the atoms, each behind those that it reads; of several, the one that begins first."""
    number = {atom: index for index, atom in enumerate(atoms)}
    graph = rustworkx.PyDiGraph(multigraph=False)
    graph.add_nodes_from(list(atoms))
    graph.add_edges_from_no_data(
        [
            (number[atom_of[one]], number[atom_of[node]])
            for node, read in enumerate(reads)
            for one in read
            if atom_of[one] != atom_of[node]
        ]
    )
    order: list[int] = rustworkx.lexicographical_topological_sort(graph, key=lambda atom: f"{atom:09d}")
    return order


def _in_order(reads: Sequence[Sequence[int]], members: Sequence[Sequence[int]]) -> list[list[int]]:
    layer_of = {node: group[0] for group in members for node in group}
    groups = {group[0]: list(group) for group in sorted(members, key=lambda group: group[0])}
    return [
        groups[first] for first in _topological(groups, reads, [layer_of[one] for one in range(len(reads))])
    ]


def _common(paths: Sequence[str]) -> str:
    """Return the longest path that all begin with."""
    first, *others = (path.split(".") for path in paths)
    length = 0
    for parts in zip(first, *others, strict=False):
        if len(set(parts)) > 1:
            break
        length += 1
    return ".".join(first[:length])


def _key(node: Node, blocks: Mapping[str, str] | None) -> str:
    path = module_path(node)
    return path if blocks is None else blocks.get(path, path)


def _block_paths(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return for each module's path that of its block.

    A block is an element of a list. Lists are `ModuleList`, and a `Sequential` or `ModuleDict` of modules
    with parts. A module beside such lists, with no list of its own, is one too. Without any such list, blocks
    are the module's parts.
    """
    lists = {path for path, module in modules.items() if _is_list(module)}
    found = {}
    for path in modules:
        parts = path.split(".") if path else []
        block = ""
        for length in range(1, len(parts) + 1):
            block, above = ".".join(parts[:length]), ".".join(parts[: length - 1])
            if block in lists:
                continue
            if above in lists or not any(one.startswith(block + ".") for one in lists):
                break
        found[path] = block
    return found


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return len(module) > 0
    composite = any(any(one.children()) for one in module.children())
    return isinstance(module, nn.Sequential | nn.ModuleDict) and composite


def _named(
    groups: Sequence[Sequence[Node]], level: str, values: Values, paths: Mapping[str, str] | None
) -> list[OperatorGroup]:
    """Return groups with readable names, each once."""
    found, taken = [], set[str]()
    for nodes in groups:
        path = _common([_key(node, paths) for node in nodes])
        operators = list(dict.fromkeys(map(operator_name, nodes)))
        module = values.exported.modules.get(path)
        whole = (
            level != "operator" and path and module is not None and (level == "block" or len(operators) > 1)
        )
        parts = "+".join(operators[:3]) + ("+..." if len(operators) > 3 else "")
        leaf = module is not None and not any(module.children())
        base = (
            path
            if path and (whole or (leaf and level != "operator"))
            else ".".join(filter(None, (path, parts)))
        )
        name, number = base, 2
        while name in taken:
            name, number = f"{base}.{number}", number + 1
        taken.add(name)
        kind = type(module).__name__ if base == path and module is not None else parts
        found.append(OperatorGroup(re.sub(r"\s", "", name), kind, tuple(nodes)))
    return found
