"""The memory of other stacks that a plan does not determine, as their files state it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.plan import Buffers, Sharding
from weft.describe.units import shown
from weft.doors.configuration import AUTO, LIKE_WEFT, StatedMemory, truth, whole
from weft.errors import InputError, Violation

# The defaults of DeepSpeed, in elements.
_BUCKET, _LIVE = 5 * 10**8, 10**9
_SECTION = "zero_optimization"
# The size of a bucket of PyTorch's DDP, in MiB.
_DDP = {"ddp_bucket_cap_mb": 25}
LIKE_MEGATRON = StatedMemory(stack="megatron-lm")


def memory_of_deepspeed(
    given: Mapping[str, Any], sharding: Sharding | None, pipeline: int, file: str
) -> StatedMemory:
    """Return the memory of a DeepSpeed file with these keys.

    Stages 1 and 2 reduce a bucket while the next one fills, if reductions overlap and there is no pipeline.
    Their steps gather weights in buckets. Stage 3 has one bucket of gradients. It gathers layers ahead, up to
    a number of parameters.

    Raises:
        InputError: with every size that is no positive number of elements.
    """
    usual = {
        "reduce_bucket_size": _BUCKET,
        "allgather_bucket_size": _BUCKET,
        "stage3_max_live_parameters": _LIVE,
    }
    sizes = positive(given, {f"{_SECTION}.{key}": size for key, size in usual.items()}, file)
    if sharding in (None, "zero-0"):
        return LIKE_WEFT
    bucket, gathered, live = sizes
    twice = sharding != "zero-3" and pipeline == 1 and overlaps_collectives(given, sharding)
    return StatedMemory(
        stack="deepspeed",
        buffers=Buffers(reduced=bucket * (1 + twice), gathered=live if sharding == "zero-3" else gathered),
    )


def overlaps_collectives(given: Mapping[str, Any], sharding: Sharding | None) -> bool:
    """Return True if ZeRO's collectives run beside computations; untold, those of stage 3 alone do."""
    said = given.get(f"{_SECTION}.overlap_comm")
    return sharding not in (None, "zero-0") and (sharding == "zero-3" if said is None else truth(said))


def memory_of_ddp(given: Mapping[str, Any], file: str) -> StatedMemory:
    """Return the memory of a program that reduces by `DistributedDataParallel`.

    It keeps all its buckets. Together they are as large as all gradients, whatever the size of each.

    Raises:
        InputError: when that size is no positive whole number.
    """
    positive(given, _DDP, file)
    return LIKE_WEFT


def memory_of_fsdp2(sharding: Sharding | None) -> StatedMemory:
    """Return the memory of a program that shards by `torch.distributed.fsdp.fully_shard`."""
    return StatedMemory(stack="fsdp2") if sharding in ("zero-2", "zero-3") else LIKE_WEFT


def positive(given: Mapping[str, Any], usual: Mapping[str, int], file: str) -> list[int]:
    """Return sizes by the keys of `usual`; a program's own, where the file leaves one open.

    Raises:
        InputError: with every size that is no positive whole number.
    """
    found, problems = [], []
    for key, size in usual.items():
        said = whole(given.get(key))
        if said is None or said == AUTO:
            found.append(size)
        elif isinstance(said, int) and not isinstance(said, bool) and said > 0:
            found.append(said)
        else:
            problem = f"{shown(given[key])}: the size of a buffer is a positive whole number"
            problems.append(Violation(f"{file}: {key}", problem, str(size)))
    if problems:
        raise InputError(problems)
    return found
