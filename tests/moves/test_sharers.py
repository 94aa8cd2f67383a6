"""Which replicas share with whom: those of a node, those that are there at all, those that nobody pins."""

from __future__ import annotations

import pytest

from weft.describe.cluster_file import parse_cluster
from weft.describe.layout import Layout, PartialLayout
from weft.moves.sharers import among_replicas, island_on_nodes, replicas_of, sharers_of, sharings
from weft.predict.cost.memory import SHARDINGS

CLUSTER = parse_cluster("32xa100-80gb")


def layout(**settings: object) -> Layout:
    usual = {"pp": 1, "dp": 32, "loops": 1, "micro_batch_size": 1, "schedule": "1f1b"}
    return Layout(**{**usual, **settings})


@pytest.mark.parametrize(
    ("on", "degrees", "expected"),
    [
        ("32xa100-80gb", {"dp": 32}, 8),
        ("32xa100-80gb", {"dp": 16, "pp": 2}, 8),
        ("32xa100-80gb", {"dp": 16, "tp": 2}, 4),
        ("32xa100-80gb", {"dp": 8, "pp": 4}, None),
        ("32xa100-80gb", {"dp": 4, "tp": 8}, None),
        ("24xa100-80gb", {"dp": 12, "pp": 2}, 4),
        ("24xa100-80gb", {"dp": 3, "pp": 8}, None),
        ("8xa100-80gb", {"dp": 8}, None),
        ("16xa100-80gb+4xa100-80gb", {"dp": 20}, 4),
        ("16xa100-80gb", {"dp": 8, "pp": 2, "schedule": "chimera"}, 8),
    ],
)
def test_islands_are_the_replicas_of_a_node(
    on: str, degrees: dict[str, object], expected: int | None
) -> None:
    assert island_on_nodes(parse_cluster(on), layout(**degrees)) == expected


def test_all_replicas_share_unless_they_are_parted() -> None:
    both_ways = layout(pp=2, dp=4, schedule="chimera", sharding="zero-1")
    assert replicas_of(both_ways) == sharers_of(both_ways) == 8
    assert sharers_of(layout(sharding="zero-1", island=4)) == 4


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        ({"sharding": "zero-3", "island": 8}, ("zero-3", 8)),
        ({"sharding": "zero-3", "island": 32}, ("zero-3", None)),
        ({"sharding": "zero-3", "island": 1}, ("zero-3", None)),
        ({"sharding": "zero-0", "island": 8}, ("zero-0", None)),
        ({"sharding": "zero-3", "island": 8, "dp": 1}, ("zero-0", None)),
    ],
)
def test_nobody_shares_with_replicas_that_are_not_there(
    wanted: dict[str, object], kept: tuple[str, int | None]
) -> None:
    found = among_replicas(layout(**wanted))
    assert (found.sharding, found.island) == kept


@pytest.mark.parametrize(
    ("pins", "opened", "lightest", "expected"),
    [
        ({}, True, False, [*[(level, None) for level in SHARDINGS], ("zero-3", 8)]),
        ({}, True, True, [(level, None) for level in SHARDINGS]),
        ({}, False, False, [("zero-0", None)]),
        ({"sharding": "zero-3"}, True, False, [("zero-3", None), ("zero-3", 8)]),
        ({"sharding": "zero-3"}, False, False, [("zero-3", None)]),
        ({"island": 4}, True, False, [(level, 4) for level in SHARDINGS[1:]]),
        ({"sharding": "zero-1", "island": 4}, False, True, [("zero-1", 4)]),
    ],
)
def test_what_nobody_pins_is_tried(
    pins: dict[str, object], opened: bool, lightest: bool, expected: list[tuple[str, int | None]]
) -> None:
    found = sharings(CLUSTER, layout(), PartialLayout(**pins), opened=opened, lightest=lightest)
    assert [(one.sharding, one.island) for one in found] == expected


def test_one_replica_has_nothing_to_try() -> None:
    alone = layout(pp=32, dp=1)
    assert list(sharings(CLUSTER, alone, PartialLayout(), opened=True, lightest=False)) == [alone]
