"""Branches that are alike: with the same structure, the same costs, and the same neighbours outside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from weft.planning.planners.graph_costs import GraphCosts
from weft.planning.planners.graphpipe.trees import Series, Tree, layers_of

# Structure, costs of the layers, and edges: ends inside by position, ends outside by number below 0.
Signature = tuple[str, tuple[bytes, ...], tuple[tuple[int, int], ...]]


class Signatures:
    """The signatures of the trees over one graph of layers, with costs on each kind of devices."""

    def __init__(self, kinds: Sequence[GraphCosts]) -> None:
        self._kinds, self._costs = kinds, kinds[0]
        self._known: dict[tuple[int, ...], Signature] = {}

    def of(self, tree: Tree) -> Signature:
        """Return the signature of a tree: alike trees have the same."""
        layers = layers_of(tree)
        if layers not in self._known:
            place = {layer: index for index, layer in enumerate(layers)}
            edges = {
                (place.get(one, -1 - one), place.get(other, -1 - other))
                for layer in layers
                for one, other in [
                    *((producer, layer) for producer in self._costs.producers[layer]),
                    *((layer, consumer) for consumer in self._costs.consumers[layer]),
                ]
            }
            keys = tuple(self._keys[layer] for layer in layers)
            self._known[layers] = (_shape(tree), keys, tuple(sorted(edges)))
        return self._known[layers]

    def sorted(self, branches: Sequence[Tree]) -> list[Tree]:
        """Return branches with rising work, alike ones together."""
        return sorted(branches, key=lambda branch: (self._work_s(branch), self.of(branch)))

    def different(self, branches: Sequence[Tree]) -> list[int]:
        """Return the position of the first of all alike branches."""
        first: dict[Signature, int] = {}
        for index, branch in enumerate(branches):
            first.setdefault(self.of(branch), index)
        return list(first.values())

    def _work_s(self, tree: Tree) -> float:
        costs = next(iter(self._costs.passes.values()))
        return sum(sorted(float(costs.forward_s[one] + costs.backward_s[one]) for one in layers_of(tree)))

    @cached_property
    def _keys(self) -> list[bytes]:
        tables = [
            column
            for costs in self._kinds
            for column in (
                *(column for key in sorted(costs.passes) for column in costs.passes[key]),
                *(costs.state_bytes, costs.buffer_bytes, costs.reduced_bytes),
            )
        ]
        rows = np.stack(tables, axis=1)
        return [row.tobytes() for row in rows]


def _shape(tree: Tree) -> str:
    if isinstance(tree, int):
        return "."
    inside = "".join(map(_shape, tree.parts))
    return f"({inside})" if isinstance(tree, Series) else f"[{inside}]"
