"""The reduction of a graph of layers to one edge, if it is series-parallel, and to its factors otherwise.

Layers are edges between junctions. Edges in series merge, and so do edges between the same junctions. The
worklist sees every edge a constant number of times. The source is Valdes, Tarjan and Lawler, The recognition
of series parallel digraphs, 1982.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import rustworkx

from weft.planning.planners.graphpipe.trees import Edge, Tree, joined, layers_of


class _Merged(NamedTuple):
    """Two ropes that have become one edge."""

    kind: Literal["series", "parallel"]
    one: _Rope
    other: _Rope


# The tree of an edge, as it was merged; None holds no layer.
_Rope = Tree | _Merged | None
_START, _END = -1, -2


class Irreducible(NamedTuple):
    """A part of a network between two junctions, with the junctions and the layers inside."""

    first: int
    last: int
    junctions: frozenset[int]
    layers: tuple[int, ...]


@dataclass
class Reduction:
    """Junctions, joined by edges that hold parts of the tree.

    Attributes:
        after, before: by junction, the edge to each later or earlier one.
    """

    layers: Sequence[int]
    edges: Sequence[Edge]
    after: dict[int, dict[int, _Rope]] = field(default_factory=dict)
    before: dict[int, dict[int, _Rope]] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        consumers: dict[int, list[int]] = {layer: [] for layer in self.layers}
        producers: dict[int, list[int]] = {layer: [] for layer in self.layers}
        for one, other in self.edges:
            consumers[one].append(other)
            producers[other].append(one)
        place = {layer: 2 * index for index, layer in enumerate(self.layers)}
        begins = {layer: place[layer] if producers[layer] else _START for layer in self.layers}
        ends = {layer: place[layer] + 1 if consumers[layer] else _END for layer in self.layers}
        joined: set[int] = set()
        for layer in self.layers:
            together = consumers[layer]
            if together and all(producers[one] == producers[together[0]] for one in together):
                group = producers[together[0]]
                if all(consumers[one] == together for one in group):
                    # Each of these waits for each of those: one junction between them.
                    joined |= set(group)
                    ends |= dict.fromkeys(group, begins[together[0]])
                    begins |= dict.fromkeys(together, begins[together[0]])
        for one, other in self.edges:
            if one not in joined:
                self._add(ends[one], begins[other], None)
        for layer in self.layers:
            self._add(begins[layer], ends[layer], layer)
        self._reduce()

    @property
    def tree(self) -> Tree | None:
        """The tree of all layers, if one edge is left."""
        left = sum(map(len, self.after.values()))
        return _tree_of(self.after[_START][_END]) if left == 1 else None

    def _add(self, first: int, last: int, held: _Rope) -> None:
        """Add an edge, and merge it with one between the same junctions."""
        ways = self.after.setdefault(first, {})
        if last in ways:
            other = ways[last]
            held = held if other is None else other if held is None else _Merged("parallel", other, held)
        ways[last] = held
        self.before.setdefault(last, {})[first] = held
        self.waiting += (first, last)

    def _take(self, first: int, last: int) -> _Rope:
        del self.before[last][first]
        return self.after[first].pop(last)

    def _reduce(self) -> None:
        while self.waiting:
            middle = self.waiting.pop()
            into, out = self.before.get(middle, {}), self.after.get(middle, {})
            if middle < 0 or len(into) != 1 or len(out) != 1:
                continue
            (first,), (last,) = into, out
            one, other = self._take(first, middle), self._take(middle, last)
            self._add(
                first, last, one if other is None else other if one is None else _Merged("series", one, other)
            )

    def smallest_factor(self) -> Irreducible:
        """Return the part between two junctions that is not reduced and has the fewest layers."""
        junctions = sorted({one for one, ways in self.after.items() if ways} | {_END})
        graph = rustworkx.PyDiGraph()
        graph.add_nodes_from(junctions)
        place = {junction: index for index, junction in enumerate(junctions)}
        graph.add_edges_from_no_data(
            [(place[one], place[other]) for one, ways in self.after.items() for other in ways]
        )
        forward = rustworkx.immediate_dominators(graph, place[_START])
        graph.reverse()
        backward = rustworkx.immediate_dominators(graph, place[_END])
        factors = (
            factor
            for first, last in sorted(backward.items())
            if first != last and forward[last] == first
            for factor in self._factors(junctions[first], junctions[last])
        )
        return min(factors, key=lambda factor: (len(factor.layers), factor.layers))

    def _factors(self, first: int, last: int) -> Iterator[Irreducible]:
        """Yield the connected parts between two junctions, without single edges."""
        inside = self._reached(first, self.after, last) & self._reached(last, self.before, first)
        while inside:
            part, waiting = {min(inside)}, [min(inside)]
            while waiting:
                near = waiting.pop()
                more = ({*self.after.get(near, {}), *self.before.get(near, {})} & inside) - part
                part |= more
                waiting += more
            inside -= part
            layers = (layer for one, other in self._ways(part) for layer in _held(self.after[one][other]))
            yield Irreducible(first, last, frozenset(part), tuple(sorted(layers)))

    def _ways(self, junctions: Collection[int]) -> list[Edge]:
        """Return the edges that touch any of the junctions."""
        ways = {(one, other) for one in junctions for other in self.after.get(one, {})}
        return sorted(ways | {(one, other) for other in junctions for one in self.before.get(other, {})})

    def _reached(self, start: int, ways: Mapping[int, Mapping[int, _Rope]], stop: int) -> set[int]:
        found: set[int] = set()
        waiting = [start]
        while waiting:
            for one in ways.get(waiting.pop(), {}):
                if one not in found and one != stop:
                    found.add(one)
                    waiting.append(one)
        return found

    def replace(self, factor: Irreducible, tree: Tree) -> None:
        """Put one edge with a tree in the place of a factor."""
        for one, other in self._ways(factor.junctions):
            self._take(one, other)
        self._add(factor.first, factor.last, tree)
        self._reduce()


def _held(rope: _Rope) -> Iterator[int]:
    """Yield the layers of a rope."""
    waiting = [rope]
    while waiting:
        one = waiting.pop()
        if isinstance(one, _Merged):
            waiting += (one.one, one.other)
        elif one is not None:
            yield from layers_of(one)


def _tree_of(rope: _Rope) -> Tree:
    """Return the tree of a rope. Parts of one kind join, however deep the rope is on their account."""
    if not isinstance(rope, _Merged):
        assert rope is not None, "every graph has a layer"
        return rope
    parts: list[Tree] = []
    waiting: list[_Rope] = [rope]
    while waiting:
        one = waiting.pop()
        if isinstance(one, _Merged) and one.kind == rope.kind:
            waiting += (one.other, one.one)
        else:
            parts.append(_tree_of(one))
    return joined(rope.kind, parts)
