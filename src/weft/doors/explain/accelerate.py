"""Accelerate: the YAML of `accelerate launch --config_file`, with whichever plugin it configures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.plan import Recompute, Sharding
from weft.doors.configuration import Configuration, counts, flat, truth, whole
from weft.doors.explain.deepspeed import SHARDINGS
from weft.doors.explain.reading import yaml_mapping

NAME = "Accelerate"
_MARKS = ("compute_environment", "distributed_type")
_SIZES = "parallelism_config.parallelism_config_"
_MEGATRON = "megatron_lm_config.megatron_lm_"
_ULYSSES = f"{_SIZES}sp_size"
_COUNTS = {
    "devices": ("num_processes",),
    "pp": (f"{_MEGATRON}pp_degree",),
    "tp": (f"{_MEGATRON}tp_degree", f"{_SIZES}tp_size", "tp_config.tp_size"),
    "cp": (f"{_SIZES}cp_size", f"{_MEGATRON}context_parallel_size"),
    "micro_batches": (f"{_MEGATRON}num_micro_batches", "deepspeed_config.gradient_accumulation_steps"),
}
# FSDP1's strategies, by number and by name.
_STRATEGIES: Mapping[str, Sharding] = {
    "1": "zero-3",
    "FULL_SHARD": "zero-3",
    "2": "zero-2",
    "SHARD_GRAD_OP": "zero-2",
    "3": "zero-0",
    "NO_SHARD": "zero-0",
    "4": "zero-3",
    "HYBRID_SHARD": "zero-3",
    "5": "zero-2",
    "HYBRID_SHARD_ZERO2": "zero-2",
}


def recognises(text: str, name: str) -> bool:
    """Whether it is YAML that says how Accelerate distributes."""
    record = yaml_mapping(text)
    return record is not None and any(mark in record for mark in _MARKS)


def read(text: str, name: str) -> Configuration:
    """The keys, dotted.

    Raises:
        InputError: when a degree is no count.
    """
    given = flat(yaml_mapping(text) or {}, name)
    # Accelerate has two ways to divide a sample; a file that uses one says 1 of the other.
    ulysses = whole(given.get(_ULYSSES)) not in (None, 1)
    table = _COUNTS | {"cp": (_ULYSSES,)} if ulysses else _COUNTS
    values, keys = counts(given, table, name)
    kind = str(given.get("distributed_type", "NO")).upper()
    sharding = _sharding(given, kind)
    precision = str(given.get("mixed_precision", "no"))
    said = {
        "sharding": sharding,
        "island": _island(given, sharding, name),
        "recompute": _recompute(given, kind),
        "schedule": "1f1b",
        "loops": 1,
        "blocking": ("messages",) if values.get("pp", 1) > 1 else (),
    }
    configuration = Configuration(
        stack=NAME,
        given=given,
        keys=keys,
        precision="fp32" if precision == "no" else precision if precision in ("bf16", "fp16") else None,
        clips=_clips(given),
        unpredicted=tuple(_unpredicted(given, kind)),
    )
    return configuration.saying(said | values)


def _sharding(given: Mapping[str, Any], kind: str) -> Sharding | None:
    if kind == "DEEPSPEED":
        stage = whole(given.get("deepspeed_config.zero_stage", 2))
        return SHARDINGS.get(stage) if isinstance(stage, int) else None
    if kind == "MEGATRON_LM":
        return "zero-1" if truth(given.get(f"{_MEGATRON}use_distributed_optimizer")) else "zero-0"
    if kind != "FSDP":
        return "zero-0"
    resharded = given.get("fsdp_config.fsdp_reshard_after_forward")
    strategy = str(given.get("fsdp_config.fsdp_sharding_strategy", resharded)).upper()
    if strategy in _STRATEGIES:
        return _STRATEGIES[strategy]
    return "zero-2" if resharded is not None and not truth(resharded) else "zero-3"


def _island(given: Mapping[str, Any], sharding: Sharding | None, file: str) -> int | None:
    axes = {axis: (f"{_SIZES}dp_{axis}_size",) for axis in ("replicate", "shard")}
    sizes, _ = counts(given, axes, file)
    replicated = sizes.get("replicate", 1) > 1 and sizes.get("shard", 1) > 1
    return sizes["shard"] if replicated and sharding != "zero-0" else None


def _recompute(given: Mapping[str, Any], kind: str) -> Recompute | None:
    """None where the program decides."""
    if kind == "MEGATRON_LM":
        granularity = given.get(f"{_MEGATRON}recompute_granularity")
        if granularity in ("full", "selective"):
            return "full" if granularity == "full" else "selective"
        return "selective" if truth(given.get(f"{_MEGATRON}recompute_activations")) else None
    if kind == "FSDP" and "fsdp_config.fsdp_activation_checkpointing" in given:
        return "full" if truth(given["fsdp_config.fsdp_activation_checkpointing"]) else "none"
    return None


def _clips(given: Mapping[str, Any]) -> bool:
    norms = (given.get(f"{_MEGATRON}gradient_clipping"), given.get("deepspeed_config.gradient_clipping"))
    return any(norm not in (None, 0, 0.0, "none", "auto") for norm in norms)


def _unpredicted(given: Mapping[str, Any], kind: str) -> list[str]:
    found = []
    keys = (
        ("fsdp_config.fsdp_offload_params", "FSDP"),
        ("deepspeed_config.offload_optimizer_device", "DEEPSPEED"),
        ("deepspeed_config.offload_param_device", "DEEPSPEED"),
    )
    for key, plugin in keys:
        value = given.get(key)
        if kind == plugin and (truth(value) or value in ("cpu", "nvme")):
            found.append(f"{key} {str(value).lower()}: predicted as held by the devices")
    if "deepspeed_config.deepspeed_config_file" in given:
        found.append("deepspeed_config.deepspeed_config_file: explain that file for what it says")
    if given.get("mixed_precision") == "fp8":
        found.append("mixed_precision fp8: predicted in the cluster's usual precision")
    return found
