"""Axolotl: the YAML of `axolotl train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.plan import Recompute, Sharding
from weft.doors.configuration import Configuration, counts, flat, truth, yaml_mapping
from weft.doors.explain.deepspeed import SHARDINGS
from weft.doors.keys import AXOLOTL
from weft.doors.replicas import replicas_of

NAME = "Axolotl"
_MARKS = ("datasets", "micro_batch_size", "sequence_len", "pretraining_dataset", "adapter", "rl")


def recognises(text: str, name: str) -> bool:
    """Return True for YAML that trains a base model."""
    record = yaml_mapping(text)
    return record is not None and "base_model" in record and any(mark in record for mark in _MARKS)


def read(text: str, name: str) -> Configuration:
    """Return the keys, dotted.

    Raises:
        InputError: when a batch size or a degree is no count.
    """
    given = flat(yaml_mapping(text) or {}, name)
    values, keys = counts(given, AXOLOTL.counts, name)
    values.setdefault("micro_batches", 1)
    sizes, _ = counts(given, AXOLOTL.parts, name)
    said = {
        "sharding": _sharding(given, sizes),
        "recompute": _recompute(given),
        "schedule": "1f1b",
        "loops": 1,
    }
    configuration = Configuration(
        stack=NAME,
        given=given,
        keys=keys,
        precision=_precision(given),
        clips=given.get("max_grad_norm", 1.0) not in (0, 0.0),
        model=str(given["base_model"]) if given.get("base_model") else None,
        unpredicted=tuple(_unpredicted(given)),
    )
    return configuration.saying(said | values | replicas_of(sizes))


def _sharding(given: Mapping[str, Any], sizes: Mapping[str, int]) -> Sharding | None:
    if given.get("deepspeed"):
        stages = (stage for stage in (3, 2, 1, 0) if f"zero{stage}" in str(given["deepspeed"]))
        return SHARDINGS.get(next(stages, -1))
    if given.get("fsdp") or "fsdp_config" in given or sizes.get("shard", 1) > 1:
        return "zero-3" if truth(given.get("fsdp_config.reshard_after_forward", True)) else "zero-2"
    return "zero-0"


def _recompute(given: Mapping[str, Any]) -> Recompute:
    checkpointing = given.get("gradient_checkpointing")
    offloaded = checkpointing in ("offload", "offload_disk", "unsloth")
    sharded = truth(given.get("fsdp_config.activation_checkpointing"))
    return "full" if truth(checkpointing) or offloaded or sharded else "none"


def _precision(given: Mapping[str, Any]) -> str | None:
    """Return the precision; `bf16: auto` takes the device's."""
    if truth(given.get("bf16")) or truth(given.get("bfloat16")) or given.get("bf16") in ("full", "auto"):
        return "bf16"
    if truth(given.get("fp16")) or truth(given.get("float16")):
        return "fp16"
    return "fp32" if given.get("bf16") is False else None


def _unpredicted(given: Mapping[str, Any]) -> list[str]:
    found = []
    if given.get("adapter"):
        found.append(f"adapter {given['adapter']}: predicted as training of all weights, an upper bound")
    for key in ("load_in_8bit", "load_in_4bit"):
        if truth(given.get(key)):
            found.append(f"{key}: predicted with weights in the precision of the products")
    if truth(given.get("sample_packing")):
        found.append("sample_packing: predicted as full samples of sequence_len tokens")
    if given.get("gradient_checkpointing") in ("offload", "offload_disk"):
        found.append("gradient_checkpointing offload: predicted as held by the devices")
    return found
