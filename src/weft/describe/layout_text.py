"""Short texts of a layout's uneven parts: counts, orders of devices, and the recomputation of stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from weft.describe.plan import RECOMPUTES, Choice, Recompute

# Number of runs in the text of an order of devices.
_RUNS_SHOWN = 6


def decision_text(name: str, value: object) -> str:
    """Return a decision of a layout in words, such as ``cp 2`` or ``blocking messages``."""
    if name == "island":
        return "all replicas share states out" if value is None else f"islands of {value} replicas"
    if name == "blocking" and isinstance(value, tuple):
        return f"blocking {' and '.join(value)}" if value else "communication beside computations"
    if name == "splits" and isinstance(value, tuple):
        return f"splits {counts_text(value)}" if value else "whole micro-batches in all stages"
    return f"{name.replace('_', ' ')} {value}"


def methods_text(methods: Sequence[Choice]) -> str:
    """Return methods with their options, such as ``offload (states, activations 0,1)``."""
    texts = []
    for choice in methods:
        named = ((word.replace("_", " "), value) for word, value in choice.options.items())
        options = [word if value is True else f"{word} {value}" for word, value in named]
        texts.append(f"{choice.name} ({', '.join(options)})" if options else choice.name)
    return " and ".join(texts)


def counts_text(counts: Sequence[int]) -> str:
    """Return counts in their order, such as ``5+6+6+5``; three or more equal counts as ``6x3``."""
    return "+".join(_repeated(count, len(list(equal))) for count, equal in groupby(counts))


def order_text(rank_order: Sequence[int]) -> str:
    """Return devices in their order, such as ``4-7 0-3``; long orders are truncated."""
    runs = _runs(rank_order)
    more = f" and {len(runs) - _RUNS_SHOWN} runs more" if len(runs) > _RUNS_SHOWN else ""
    return " ".join(runs[:_RUNS_SHOWN]) + more


def recomputes_text(recomputes: Sequence[Recompute]) -> str:
    """Return the recomputation of stages, such as ``full in stages 0-2, selective in stage 3``."""
    parts = []
    for word in RECOMPUTES[:0:-1]:
        stages = [stage for stage, one in enumerate(recomputes) if one == word]
        if stages:
            parts.append(f"{word} in stage{'s' if len(stages) > 1 else ''} {' '.join(_runs(stages))}")
    return ", ".join(parts) or RECOMPUTES[0]


def _runs(numbers: Sequence[int]) -> list[str]:
    return [str(first) if first == last else f"{first}-{last}" for first, last in _rising(numbers)]


def _repeated(count: int, times: int) -> str:
    return "+".join([str(count)] * times) if times < 3 else f"{count}x{times}"


def _rising(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last of every run of consecutive rising numbers."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]
