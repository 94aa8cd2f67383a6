"""Accelerate: the YAML of `accelerate launch --config_file`, with any plugin that it configures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.plan import Blocking, Recompute, Sharding
from weft.doors.configuration import Configuration, StatedMemory, counts, flat, truth, whole, yaml_mapping
from weft.doors.explain.deepspeed import (
    SHARDINGS,
    absent,
    blocking_of,
    incomparable,
    named,
    sharding_of,
    supposed,
    unpredicted,
)
from weft.doors.keys import ACCELERATE, ACCELERATE_ULYSSES, DEEPSPEED, IN_MEGATRON, ULYSSES
from weft.doors.optimizers import known_or_adamw
from weft.doors.replicas import groups_of_accelerate
from weft.doors.stack_memory import LIKE_MEGATRON, memory_of_deepspeed, memory_of_fsdp2
from weft.doors.stage_splits import EQUAL_BLOCKS
from weft.errors import InputError, Violation

NAME = "Accelerate"
_MARKS = ("compute_environment", "distributed_type")
_FILE = "deepspeed_config.deepspeed_config_file"
STRATEGY = "fsdp_config.fsdp_sharding_strategy"
# FSDP1's strategies, by number and by name.
STRATEGIES: Mapping[str, Sharding] = {
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
# Those that share out in each node alone.
HYBRID = ("4", "5", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
# Jobs whose devices or processes weft does not know.
_NO_GPUS = {"compute_environment": ("AMAZON_SAGEMAKER",), "distributed_type": ("TPU", "XLA")}


def recognises(text: str, name: str) -> bool:
    """Return True for YAML that configures Accelerate's distribution."""
    record = yaml_mapping(text)
    return record is not None and any(mark in record for mark in _MARKS)


def read(text: str, name: str) -> Configuration:
    """Return the keys, dotted.

    Raises:
        InputError: when a degree is no count, or the job is for SageMaker or TPUs.
    """
    given = flat(yaml_mapping(text) or {}, name)
    for key, words in _NO_GPUS.items():
        if str(given.get(key)).upper() in words:
            problem = f"{given[key]}: weft predicts processes on GPUs and CPUs that the file starts itself"
            raise InputError(Violation(f"{name}: {key}", problem))
    # Accelerate has two ways to divide a sample; a file with one of them sets the other to 1.
    table = ACCELERATE if whole(given.get(ULYSSES)) in (None, 1) else ACCELERATE_ULYSSES
    values, keys = counts(given, table.counts, name)
    kind = plugin(given)
    deepspeed = named(given[_FILE], name) if _FILE in given else None
    if deepspeed is not None:
        values = counts(deepspeed, DEEPSPEED.counts, str(given[_FILE]))[0] | values
    sharding = _sharding(given, kind, deepspeed)
    precision = str(given.get("mixed_precision", "no"))
    said = {
        "sharding": sharding,
        "recompute": _recompute(given, kind),
        "schedule": "1f1b",
        "loops": 1,
        "blocking": _blocking(kind, deepspeed or {}, sharding, values.get("pp", 1)),
    }
    configuration = Configuration(
        stack=NAME,
        given=given,
        optimizer=known_or_adamw((deepspeed or {}).get("optimizer.type")),
        keys=keys,
        precision="fp32" if precision == "no" else precision if precision in ("bf16", "fp16") else None,
        clips=_clips(given),
        launch="compiled" if _compiler(given) == "INDUCTOR" else "eager",
        unpredicted=(*_unpredicted(given), *unpredicted(deepspeed or {})),
        incomparable=(*_incomparable(given, kind, deepspeed), *incomparable(deepspeed or {})),
        supposed=supposed(deepspeed or {}),
        memory=_memory(kind, deepspeed or {}, sharding, values.get("pp", 1), str(given.get(_FILE, name))),
        split=EQUAL_BLOCKS if kind == "MEGATRON_LM" else None,
    )
    groups = groups_of_accelerate(given, sharding, name) or _nodes(given, kind, values)
    return configuration.saying(said | values | groups)


def _nodes(given: Mapping[str, Any], kind: str, values: Mapping[str, int]) -> dict[str, int]:
    """Return the island of FSDP1's hybrid strategies, which share out in each machine alone."""
    hybrid = str(given.get(STRATEGY)).upper() in HYBRID
    machines, devices = whole(given.get("num_machines", 1)), values.get("devices", 0)
    if kind != "FSDP" or not hybrid or not isinstance(machines, int) or not 1 < machines < devices:
        return {}
    return {"island": devices // machines}


def _compiler(given: Mapping[str, Any]) -> str:
    """Return the name of torch's compiler that layers run by, in capital letters."""
    return str(given.get("dynamo_config.dynamo_backend", "NO")).upper()


def plugin(given: Mapping[str, Any]) -> str:
    """Return the name of the distributing plugin, in capital letters."""
    return str(given.get("distributed_type", "NO")).upper()


def _sharding(given: Mapping[str, Any], kind: str, deepspeed: Mapping[str, Any] | None) -> Sharding | None:
    if kind == "DEEPSPEED" and _FILE in given:
        return None if deepspeed is None else sharding_of(deepspeed)
    if kind == "DEEPSPEED":
        stage = whole(given.get("deepspeed_config.zero_stage", 2))
        return SHARDINGS.get(stage) if isinstance(stage, int) else None
    if kind == "MEGATRON_LM":
        return "zero-1" if truth(given.get(f"{IN_MEGATRON}use_distributed_optimizer")) else "zero-0"
    if kind != "FSDP":
        return "zero-0"
    resharded = given.get("fsdp_config.fsdp_reshard_after_forward")
    strategy = str(given.get(STRATEGY, resharded)).upper()
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    return "zero-2" if resharded is not None and not truth(resharded) else "zero-3"


def _blocking(
    kind: str, deepspeed: Mapping[str, Any], sharding: Sharding | None, pipeline: int
) -> tuple[Blocking, ...]:
    if kind == "DEEPSPEED":
        return blocking_of(deepspeed, sharding, pipeline)
    return ("messages",) if pipeline > 1 else ()


def _memory(
    kind: str, deepspeed: Mapping[str, Any], sharding: Sharding | None, pipeline: int, file: str
) -> StatedMemory:
    if kind == "DEEPSPEED":
        return memory_of_deepspeed(deepspeed, sharding, pipeline, file)
    if kind == "MEGATRON_LM":
        return LIKE_MEGATRON
    return memory_of_fsdp2(sharding)


def _recompute(given: Mapping[str, Any], kind: str) -> Recompute | None:
    """Return the recomputation; None where the program decides."""
    if kind == "MEGATRON_LM":
        granularity = given.get(f"{IN_MEGATRON}recompute_granularity")
        if granularity in ("full", "selective"):
            return "full" if granularity == "full" else "selective"
        return "selective" if truth(given.get(f"{IN_MEGATRON}recompute_activations")) else None
    if kind == "FSDP" and "fsdp_config.fsdp_activation_checkpointing" in given:
        return "full" if truth(given["fsdp_config.fsdp_activation_checkpointing"]) else "none"
    return None


def _clips(given: Mapping[str, Any]) -> bool:
    norms = (given.get(f"{IN_MEGATRON}gradient_clipping"), given.get("deepspeed_config.gradient_clipping"))
    return any(norm not in (None, 0, 0.0, "none", "auto") for norm in norms)


def _unpredicted(given: Mapping[str, Any]) -> list[str]:
    if given.get("mixed_precision") == "fp8":
        return ["mixed_precision fp8: predicted in the cluster's usual precision"]
    return []


def _incomparable(given: Mapping[str, Any], kind: str, deepspeed: Mapping[str, Any] | None) -> list[str]:
    found = []
    keys = (
        ("fsdp_config.fsdp_offload_params", "FSDP"),
        ("deepspeed_config.offload_optimizer_device", "DEEPSPEED"),
        ("deepspeed_config.offload_param_device", "DEEPSPEED"),
    )
    for key, plugin in keys:
        value = given.get(key)
        if kind == plugin and (truth(value) or value in ("cpu", "nvme")):
            found.append(f"{key} {str(value).lower()}: what is kept in host memory is not modelled")
    if _FILE in given and deepspeed is None:
        found.append(absent(_FILE, given[_FILE]))
    return found
