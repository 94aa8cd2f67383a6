"""The join of operators into layers that form no cycle; without torch.

Operators that must be together are one from the start, with everything on a path between them. Then they are
taken in order. Each joins the newest layer of its module, or of its block. If that would close a cycle of
layers, it begins another layer of the same module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import rustworkx


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
        key = common_path([keys[node] for node in atoms[atom]])
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


def common_path(paths: Sequence[str]) -> str:
    """Return the longest path that all begin with."""
    first, *others = (path.split(".") for path in paths)
    length = 0
    for parts in zip(first, *others, strict=False):
        if len(set(parts)) > 1:
            break
        length += 1
    return ".".join(first[:length])


def unused_name(name: str, taken: set[str]) -> str:
    """Return a name, with a number behind it if it is among those `taken`, which then hold it."""
    found, number = name, 2
    while found in taken:
        found, number = f"{name}.{number}", number + 1
    taken.add(found)
    return found
