"""Costs follow from prices of devices; where some have none, it is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.planning.goals import price_per_hour, unpriced


def priced(*prices: float | None) -> Cluster:
    cluster = parse_cluster("8xa100-80gb+8xt4")
    groups = (
        replace(group, device=replace(group.device, price_per_hour=price))
        for group, price in zip(cluster.groups, prices, strict=True)
    )
    return replace(cluster, groups=tuple(groups))


@pytest.mark.parametrize(
    ("prices", "per_hour", "missing"),
    [((2.0, 0.5), 20.0, None), ((2.0, None), None, "t4"), ((None, None), None, None)],
)
def test_a_device_without_a_price_is_named_where_others_have_one(
    prices: tuple[float | None, ...], per_hour: float | None, missing: str | None
) -> None:
    cluster = priced(*prices)
    assert price_per_hour(cluster) == per_hour
    assert unpriced(cluster) == missing
