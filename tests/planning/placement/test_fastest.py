"""The best of several ways: the least makespan, the first of equal ones, and refusals only if all refuse."""

from __future__ import annotations

from typing import Any

import pytest
from random_operators import devices_of, graph_of

from weft.errors import InputError
from weft.planning.placement import fastest as ways
from weft.planning.placement.fastest import Rule, fastest, fastest_of_rules
from weft.planning.placement.list_scheduler import earliest_task_first

# Two operators that could run side by side.
GRAPH, DEVICES = graph_of([[3, 3]] * 2, [], permanent=(2, 2)), devices_of(2, 3)


def gives(*device: int) -> Rule:
    """A rule that gives these devices."""
    return lambda graph, devices: device


def test_the_least_makespan_counts_and_of_equal_ones_the_first() -> None:
    roomy = devices_of(2)
    rules = [gives(0, 0), gives(1, 0), gives(0, 1)]
    assert fastest_of_rules(rules, GRAPH, roomy).device.tolist() == [1, 0]


def test_a_refusal_counts_only_where_all_refuse() -> None:
    assert fastest_of_rules([gives(0, 0), gives(0, 1), gives(1, 1)], GRAPH, DEVICES).makespan == 3
    with pytest.raises(InputError, match="must be on device 1"):
        fastest_of_rules([gives(0, 0), gives(1, 1)], GRAPH, DEVICES)
    with pytest.raises(InputError, match="fits on no device"):
        fastest([earliest_task_first], GRAPH, devices_of(2, 1))


def test_rules_that_agree_are_placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def counted(*given: Any, **options: Any) -> Any:
        asked.append(options["pinned"])
        return earliest_task_first(*given, **options)

    monkeypatch.setattr(ways, "earliest_task_first", counted)
    assert fastest_of_rules([gives(0, 1), gives(1, 0), gives(0, 1)], GRAPH, DEVICES).makespan == 3
    assert asked == [[0, 1], [1, 0]]
