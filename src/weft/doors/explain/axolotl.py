"""Axolotl: the YAML of `axolotl train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.plan import Recompute, Sharding
from weft.doors.configuration import Configuration, counts, flat, truth
from weft.doors.explain.reading import yaml_mapping

NAME = "Axolotl"
_COUNTS = {
    "micro_batch_size": ("micro_batch_size",),
    "micro_batches": ("gradient_accumulation_steps",),
    "sequence": ("sequence_len",),
    "tp": ("tensor_parallel_size",),
    "cp": ("context_parallel_size", "sequence_parallel_degree"),
}
_MARKS = ("datasets", "micro_batch_size", "sequence_len", "pretraining_dataset", "adapter", "rl")


def recognises(text: str, name: str) -> bool:
    """Whether it is YAML that trains a base model."""
    record = yaml_mapping(text)
    return record is not None and "base_model" in record and any(mark in record for mark in _MARKS)


def read(text: str, name: str) -> Configuration:
    """The keys, dotted.

    Raises:
        InputError: when a batch size or a degree is no count.
    """
    given = flat(yaml_mapping(text) or {}, name)
    values, keys = counts(given, _COUNTS, name)
    values.setdefault("micro_batches", 1)
    sharding, replicas = _replicas(given, name)
    said = {
        "sharding": sharding,
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
    return configuration.saying(said | values | replicas)


def _replicas(given: Mapping[str, Any], file: str) -> tuple[Sharding | None, dict[str, Any]]:
    axes = {axis: (f"dp_{axis}_size",) for axis in ("shard", "replicate")}
    sizes, _ = counts(given, axes, file)
    found: dict[str, Any] = {}
    if "shard" in sizes:
        found["dp"] = sizes["shard"] * sizes.get("replicate", 1)
        if sizes.get("replicate", 1) > 1:
            found["island"] = sizes["shard"]
    if given.get("deepspeed"):
        stage = next((number for number in "3210" if f"zero{number}" in str(given["deepspeed"])), None)
        return (None if stage is None else _zero(stage)), found
    if given.get("fsdp") or "fsdp_config" in given or sizes.get("shard", 1) > 1:
        kept = given.get("fsdp_config.reshard_after_forward", True)
        return ("zero-3" if truth(kept) else "zero-2"), found
    return "zero-0", found


def _zero(stage: str) -> Sharding:
    shardings: dict[str, Sharding] = {"0": "zero-0", "1": "zero-1", "2": "zero-2", "3": "zero-3"}
    return shardings[stage]


def _recompute(given: Mapping[str, Any]) -> Recompute:
    checkpointing = given.get("gradient_checkpointing")
    offloaded = checkpointing in ("offload", "offload_disk", "unsloth")
    sharded = truth(given.get("fsdp_config.activation_checkpointing"))
    return "full" if truth(checkpointing) or offloaded or sharded else "none"


def _precision(given: Mapping[str, Any]) -> str | None:
    """`bf16: auto` takes what the device has."""
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
