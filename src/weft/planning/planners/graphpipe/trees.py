"""Trees of series and parallel composition over layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Union

Edge = tuple[int, int]
Tree = Union[int, "Series", "Parallel"]


@dataclass(frozen=True)
class _Composed:
    parts: tuple[Tree, ...]

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers of all parts, part by part."""
        return tuple(layer for part in self.parts for layer in layers_of(part))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((type(self), self.parts))


class Series(_Composed):
    """Parts one after the other: all layers of a part wait for all of the part before."""


class Parallel(_Composed):
    """Parts side by side; none waits for another. Each begins with another layer, and they rise by it."""


def layers_of(tree: Tree) -> tuple[int, ...]:
    """Return the layers of a tree, part by part."""
    return (tree,) if isinstance(tree, int) else tree.layers


def joined(kind: Literal["series", "parallel"], parts: Sequence[Tree]) -> Tree:
    """Return the tree of these parts; parts of the same kind give their own parts."""
    of = Series if kind == "series" else Parallel
    own = [inner for part in parts for inner in (part.parts if isinstance(part, of) else (part,))]
    if of is Parallel:
        own.sort(key=lambda part: min(layers_of(part)))
    return of(tuple(own))
