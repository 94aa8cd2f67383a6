"""The rows of the equality table that `make test` trains; `make tables` trains the others.

The chosen rows have, all together,

- every value of every field of a row, of its model and of each option of its methods;
- every two that meet in any row of: an order, a sharding, an axis that ranks divide, a method, a precision of
  reductions;
- every row that a stated mutation names.

A row with anything new is therefore trained by `make test`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import combinations
from operator import mul
from typing import Any, TypeVar

from equality_table import Row
from mutants.mutations import mutations, rooms

Case = TypeVar("Case")
AXES = ("pp", "dp", "tp", "cp", "ep")


def covering(
    of: Sequence[Case], traits: Callable[[Case], frozenset[Any]], cost: Callable[[Case], float] = lambda _: 1
) -> list[Case]:
    """Cases that together have all traits of all, found greedily: the most new ones for the cost first.

    Those whose traits later ones have, too, are left out again, the most costly first.
    """
    left = frozenset[Any]().union(*map(traits, of))
    # A case never has more new traits than when it was looked at last.
    most = [(-len(traits(case)) / cost(case), place) for place, case in enumerate(of)]
    heapify(most)
    chosen = []
    while left:
        believed, place = heappop(most)
        new = traits(of[place]) & left
        if (worth := -len(new) / cost(of[place])) > believed:
            heappush(most, (worth, place))
        else:
            left -= new
            chosen.append(of[place])
    having = Counter(trait for case in chosen for trait in traits(case))
    for case in sorted(chosen, key=cost, reverse=True):
        if all(having[trait] > 1 for trait in traits(case)):
            chosen.remove(case)
            having.subtract(traits(case))
    return chosen


def size(row: Row) -> int:
    """What a row costs, more or less: the steps of its ranks."""
    copies, degrees = row.copies or (1,) * row.pp, row.degrees or (1,) * row.pp
    ranks = sum(map(sum, row.unlike)) or sum(map(mul, copies, degrees)) * row.dp
    return ranks * row.tp * row.cp * row.ep * row.steps


@cache
def marks(row: Row) -> frozenset[tuple[str, str]]:
    """Order, sharding, methods, divided axes, unlike copies and degrees, and the precision of reductions."""
    reduced = {("reduced in", one) for one in [row.reduce_precision] if one is not None}
    axes = {("axis", axis) for axis in AXES if getattr(row, axis) > 1}
    axes |= {("axis", name) for name in ("copies", "degrees", "unlike") if getattr(row, name)}
    methods = {("method", type(one).__name__) for one in row.methods}
    return frozenset({("order", row.schedule), ("sharding", row.sharding), *axes, *methods, *reduced})


@cache
def traits(row: Row) -> frozenset[tuple[Hashable, ...]]:
    """All that the chosen rows must have, of this one."""
    name = str(row)
    stated = {("stated", name)} if name in _stated() else set()
    return frozenset(stated | {*_values(row)} | {*combinations(sorted(marks(row)), 2)})


@cache
def _stated() -> frozenset[str]:
    """The names of cases that stated mutations name."""
    tests = [test for one in mutations(rooms()) for test in one.tests]
    return frozenset(test.partition("[")[2].removesuffix("]") for test in tests)


def _values(row: Row) -> Iterator[tuple[Hashable, ...]]:
    """Of fields, of the model, and of options of methods."""
    yield from (("model", row.model.name), ("sequence", row.model.sequence))
    yield ("tied", row.model.family if row.model.tied_embeddings else None)
    for owner in (row, *row.methods):
        name = type(owner).__name__
        yield (name,)
        for field in fields(owner):
            yield from ((name, field.name, value) for value in _parts(getattr(owner, field.name)))


def _parts(given: Any) -> list[Hashable]:
    """A word or a number, or those of a sequence; of all else, that it is given."""
    if _is_plain(given):
        return [given]
    if isinstance(given, tuple) and all(map(_is_plain, given)):
        return list(given) or [()]
    return [getattr(given, "__name__", "given")]


def _is_plain(given: Any) -> bool:
    """Also of an option's name with its value."""
    if isinstance(given, tuple):
        return len(given) == 2 and isinstance(given[0], str) and _is_plain(given[1])
    return given is None or isinstance(given, int | float) or (isinstance(given, str) and " " not in given)
