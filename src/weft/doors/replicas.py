"""Replicas in the counts of other stacks: `replicate` groups of `shard` ranks that share states.

Weft's decisions are `dp`, all replicas, and `island`, the replicas of a group where there are several.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from weft.describe.layout import Layout
from weft.describe.plan import AXES, Sharding
from weft.doors.configuration import counts, whole
from weft.doors.keys import ACCELERATE, DEEPSPEED, MEGATRON_LM


def replica_counts(layout: Layout) -> dict[str, int]:
    """Return both counts of a layout."""
    shard = 1 if layout.sharding == "zero-0" else layout.island or layout.dp
    return {"replicate": layout.dp // shard, "shard": shard}


def group_counts(layout: Layout) -> dict[str, int]:
    """Return both counts of a layout with islands; nothing for others."""
    return {} if layout.island is None else replica_counts(layout)


def replicas_of(found: Mapping[str, int]) -> dict[str, int]:
    """Return the decisions that both counts make; none without `shard`."""
    shard, replicate = found.get("shard"), found.get("replicate", 1)
    if shard is None:
        return {}
    return {"dp": shard * replicate} | ({"island": shard} if replicate > 1 else {})


def on_devices(devices: int) -> dict[str, int | None]:
    """Return the values for replicas on `devices` devices, without the group size for other devices."""
    return {"devices": devices, "island": None}


def groups_of_accelerate(given: Mapping[str, Any], sharding: Sharding | None, file: str) -> dict[str, int]:
    """Return the island of a YAML; its replicas follow from its processes."""
    found, _ = counts(given, ACCELERATE.parts, file)
    several = found.get("replicate", 1) > 1 and found.get("shard", 1) > 1
    return {"island": found["shard"]} if several and sharding != "zero-0" else {}


def groups_of_deepspeed(given: Mapping[str, Any], stage: Any) -> dict[str, int]:
    """Return the island of a JSON, which counts with stage 3 only (MiCS)."""
    size = whole(given.get(DEEPSPEED.key("shard")))
    return {"island": size} if stage == 3 and isinstance(size, int) and size > 1 else {}


def groups_of_megatron_lm(
    given: Mapping[str, Any], values: Mapping[str, int], sharding: Sharding, devices: int | None
) -> dict[str, int]:
    """Return the island from the optimizer's instances, where all devices are known."""
    instances = whole(given.get(MEGATRON_LM.key("replicate")))
    if not isinstance(instances, int) or instances < 2 or devices is None or sharding == "zero-0":
        return {}
    ranks_of_replica = prod(values.get(axis, 1) for axis in AXES if axis != "dp")
    return {"island": max(1, devices // ranks_of_replica // instances)}
