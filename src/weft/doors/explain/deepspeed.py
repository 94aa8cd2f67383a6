"""DeepSpeed: the JSON that `deepspeed.initialize` takes, and its sections inside other files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.plan import Blocking, Recompute, Sharding
from weft.doors.configuration import (
    AUTO,
    Configuration,
    counts,
    flat,
    json_mapping,
    named_file,
    truth,
    whole,
)
from weft.doors.keys import DEEPSPEED, Name
from weft.doors.optimizers import in_torch, other_optimizer
from weft.doors.replicas import groups_of_deepspeed
from weft.doors.stack_memory import memory_of_deepspeed, overlaps_collectives
from weft.errors import InputError, Violation

NAME = "DeepSpeed"
_MARKS = (DEEPSPEED.key("global_batch"), DEEPSPEED.key("micro_batch_size"), "zero_optimization")
_REDUCED = "communication_data_type"
# Options that weft predicts without them.
_PREDICTED_OTHERWISE = {
    "zero_optimization.zero_quantized_weights": "predicted with whole weights",
    "zero_optimization.zero_quantized_nontrainable_weights": "predicted with whole weights",
    "zero_optimization.zero_quantized_gradients": "predicted with whole gradients",
    "activation_checkpointing.cpu_checkpointing": "predicted with activations on the devices",
    "compile.deepcompile": "predicted with the engine's own gathers",
}
SHARDINGS: Mapping[int, Sharding] = {0: "zero-0", 1: "zero-1", 2: "zero-2", 3: "zero-3"}


def recognises(text: str, name: str) -> bool:
    """Return True for JSON with DeepSpeed's batch sizes or its ZeRO section."""
    record = json_mapping(text)
    return record is not None and any(mark in record for mark in _MARKS)


def read(text: str, name: str) -> Configuration:
    """Return the keys, dotted.

    Raises:
        InputError: when a batch size or a degree is no count, or a buffer has no size.
    """
    given = flat(json_mapping(text) or {}, name)
    values, keys = counts(given, DEEPSPEED.counts, name)
    size = DEEPSPEED.key("micro_batch_size")
    if not {"global_batch", "micro_batch_size"} <= {*values} and given.get(size) != AUTO:
        # By default the engine accumulates nothing.
        values.setdefault("micro_batches", 1)
    stage = whole(given.get("zero_optimization.stage", 0))
    sharding, pipeline = sharding_of(given), values.get("pp", 1)
    said = {
        "sharding": sharding,
        "recompute": _recompute(given),
        "schedule": "1f1b",
        "loops": 1,
        "blocking": blocking_of(given, sharding, pipeline),
    }
    configuration = Configuration(
        stack=NAME,
        given=given,
        # DeepSpeed's own kernel is fused.
        optimizer=in_torch(
            given.get("optimizer.type"), foreach=truth(given.get("optimizer.params.torch_adam"))
        ),
        keys=keys | {"sharding": "zero_optimization.stage"},
        precision=_precision(given),
        reduce_precision=_reduce_precision(given),
        clips=given.get("gradient_clipping", 0) not in (0, 0.0),
        unpredicted=unpredicted(given),
        incomparable=incomparable(given),
        supposed=supposed(given),
        memory=memory_of_deepspeed(given, sharding, pipeline, name),
    )
    return configuration.saying(said | values | groups_of_deepspeed(given, stage))


def named(value: object, file: str) -> Mapping[str, Any] | None:
    """Return the keys of a DeepSpeed file that another file names, dotted; None where there is no such file.

    Raises:
        InputError: when the file is no JSON object.
    """
    path = named_file(value, file)
    if path is None:
        return None
    record = json_mapping(path.read_text(encoding="utf-8-sig", errors="replace"))
    if record is None:
        raise InputError(Violation(str(path), f"named by {file}: not a JSON object"))
    return flat(record, str(path))


def absent(key: str, value: object) -> str:
    """Return the line for a DeepSpeed file that a key names and that is not there."""
    return f"{key} {value}: there is no such file here, so its stage and batches are not known"


def sharding_of(given: Mapping[str, Any]) -> Sharding | None:
    """Return the sharding of ZeRO's stage; None for a stage that does not exist."""
    stage = whole(given.get("zero_optimization.stage", 0))
    return SHARDINGS.get(stage) if isinstance(stage, int) else None


def _precision(given: Mapping[str, Any]) -> str | None:
    """Return the precision of the enabled section; None where the program decides."""
    for name in ("bf16", "bfloat16", "fp16"):
        if truth(given.get(f"{name}.enabled")):
            return "fp16" if name == "fp16" else "bf16"
    left_open = AUTO in (given.get("bf16.enabled"), given.get("fp16.enabled"))
    return None if left_open else "fp32"


def _reduce_precision(given: Mapping[str, Any]) -> str | None:
    """Return the precision of reductions if the file says one that weft has; fp16 is for scaled losses."""
    words = ("fp32", "bf16", "fp16") if _precision(given) == "fp16" else ("fp32", "bf16")
    said = str(given.get(_REDUCED)).lower()
    return said if said in words else None


def _recompute(given: Mapping[str, Any]) -> Recompute | None:
    """Return the recomputation that a pipeline's interval switches on; else the program decides."""
    interval = whole(given.get("pipeline.activation_checkpoint_interval"))
    return None if not isinstance(interval, int) else "full" if interval > 0 else "none"


def blocking_of(given: Mapping[str, Any], sharding: Sharding | None, pipeline: int) -> tuple[Blocking, ...]:
    """Return what the engine waits for.

    A pipeline waits for messages and reduces last. Without `overlap_comm`, others wait for reductions; it is
    on by default in stage 3 only, where it overlaps gathers, too. Stages 1 and 2 gather weights after a step.
    """
    overlaps = overlaps_collectives(given, sharding)
    found: list[Blocking] = []
    if sharding in ("zero-1", "zero-2") or (sharding == "zero-3" and not overlaps):
        found.append("gathers")
    if pipeline > 1:
        found.append("messages")
    if pipeline > 1 or not overlaps:
        found.append("reductions")
    return tuple(found)


def unpredicted(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the features of DeepSpeed in the file that weft does not predict."""
    lines = []
    lines += [f"{key}: {words}" for key, words in _PREDICTED_OTHERWISE.items() if truth(given.get(key))]
    if whole(given.get("zero_optimization.zero_hpz_partition_size", 1)) != 1:
        lines.append("zero_optimization.zero_hpz_partition_size: predicted without second copies of weights")
    kept = given.get("data_types.grad_accum_dtype")
    if kept not in (None, "fp32"):
        lines.append(f"data_types.grad_accum_dtype {kept}: predicted with the engine's usual gradients")
    if given.get(_REDUCED) is not None and _reduce_precision(given) is None:
        lines.append(f"{_REDUCED} {given[_REDUCED]}: predicted with reductions in fp32")
    return tuple(lines)


def incomparable(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the features of DeepSpeed in the file that make its job another than the one weft predicts."""
    keys = [f"zero_optimization.offload_{part}.device" for part in ("optimizer", "param")]
    moved = [f"{key} {given[key]}" for key in keys if given.get(key) not in (None, "none")]
    lines = [f"{one}: steps and gathers over the host's memory are not modelled" for one in moved]
    lines += other_optimizer("optimizer.type", given.get("optimizer.type"))
    if any(key.startswith(("compression_training.", "sparse_attention.")) for key in given):
        lines.append("compression_training or sparse_attention: not modelled")
    return tuple(lines)


def supposed(given: Mapping[str, Any]) -> dict[str, int]:
    """Return the values that an untold Trainer of transformers puts in place of `auto`."""
    usual: tuple[tuple[Name, int], ...] = (("micro_batch_size", 8), ("micro_batches", 1))
    return {name: value for name, value in usual if given.get(DEEPSPEED.key(name)) == AUTO}
