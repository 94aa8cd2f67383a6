"""The sizes in a `config.json`, read by key, and their mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.units import shown
from weft.errors import Violation

# Larger than any size of any model; all amounts are still exact integers in a float.
LARGEST_SIZE = 10**8


def read_sizes(
    record: Mapping[str, Any], required: Mapping[str, str], optional: Mapping[str, str], where: str
) -> tuple[dict[str, Any], list[Violation]]:
    """Return the sizes by their names, and one violation for each that is missing or no size.

    Args:
        required, optional: the keys of sizes by the sizes' names; the latter may be absent or null.
    """
    problems: list[Violation] = []
    sizes: dict[str, Any] = {}
    for size, key in {**required, **optional}.items():
        value = record.get(key)
        if value is None and size in optional:
            continue
        if key not in record:
            problems.append(Violation(f"{where}: {key}", "missing"))
        elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
            given = shown(value)
            problems.append(Violation(f"{where}: {key}", f"{given}: must be an integer of at least 1"))
        else:
            sizes[size] = value
    return sizes, problems


def tied_problems(record: Mapping[str, Any], where: str) -> list[Violation]:
    """Return a violation if the key of tied embeddings is neither true nor false, absent nor null."""
    tied = record.get("tie_word_embeddings")
    if tied is None or isinstance(tied, bool):
        return []
    return [Violation(f"{where}: tie_word_embeddings", f"{shown(tied)}: must be true or false")]


def head_problems(sizes: Mapping[str, int], keys: Mapping[str, str], where: str) -> list[Violation]:
    """Return the violation of a width that the heads do not divide."""
    hidden, heads = sizes.get("hidden"), sizes.get("heads")
    if hidden is None or heads is None or hidden % heads == 0:
        return []
    problem = f"{hidden} is not divisible by {keys['heads']} = {heads}"
    return [Violation(f"{where}: {keys['hidden']}", problem, str(max(heads, round(hidden / heads) * heads)))]


def group_problems(sizes: Mapping[str, int], keys: Mapping[str, str], where: str) -> list[Violation]:
    """Return the violation of heads that the heads of keys and values do not divide."""
    heads, groups = sizes.get("heads"), sizes.get("key_value_heads")
    if heads is None or groups is None or heads % groups == 0:
        return []
    divisors = [count for count in range(1, min(heads, 4096) + 1) if heads % count == 0]
    near = str(min(divisors, key=lambda count: abs(count - groups)))
    problem = f"{groups} does not divide {keys['heads']} = {heads}"
    return [Violation(f"{where}: {keys['key_value_heads']}", problem, near)]
