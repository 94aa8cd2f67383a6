"""The memory of other stacks that a plan does not determine, as their files state it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.plan import Buffers, Sharding
from weft.doors.configuration import LIKE_WEFT, StatedMemory, truth, whole

# The defaults of DeepSpeed, in elements.
_BUCKET, _LIVE = 5 * 10**8, 10**9
LIKE_MEGATRON = StatedMemory(stack="megatron-lm")


def memory_of_deepspeed(given: Mapping[str, Any], sharding: Sharding | None, pipeline: int) -> StatedMemory:
    """Return the memory of a DeepSpeed file with these keys.

    Stages 1 and 2 reduce a bucket while the next one fills, if reductions overlap and there is no pipeline.
    Stage 3 has one bucket. It gathers layers ahead, up to a number of parameters.
    """
    if sharding in (None, "zero-0"):
        return LIKE_WEFT
    section = "zero_optimization"
    bucket, live = (
        _size(given.get(f"{section}.{key}"), usual)
        for key, usual in (("reduce_bucket_size", _BUCKET), ("stage3_max_live_parameters", _LIVE))
    )
    twice = sharding != "zero-3" and pipeline == 1 and truth(given.get(f"{section}.overlap_comm"))
    return StatedMemory(stack="deepspeed", buffers=Buffers(reduced=bucket * (1 + twice), gathered=live))


def memory_of_fsdp2(sharding: Sharding | None) -> StatedMemory:
    """Return the memory of a program that shards by `torch.distributed.fsdp.fully_shard`."""
    return StatedMemory(stack="fsdp2") if sharding in ("zero-2", "zero-3") else LIKE_WEFT


def _size(given: object, usual: int) -> int:
    """Return a size in elements; a program's own, where the file leaves it open."""
    size = whole(given)
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else usual
