"""Axolotl: the YAML of `axolotl train`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.plan import Recompute, Sharding
from weft.describe.units import shown
from weft.doors.configuration import Configuration, StatedMemory, counts, flat, truth, yaml_mapping
from weft.doors.explain.accelerate import HYBRID, STRATEGIES
from weft.doors.explain.axolotl_adapters import (
    incomparable_adapters,
    low_rank_tables,
    unpredicted_adapters,
)
from weft.doors.explain.deepspeed import absent, incomparable, named, sharding_of, unpredicted
from weft.doors.keys import AXOLOTL
from weft.doors.optimizers import known_or_adamw, other_optimizer, paged_optimizer
from weft.doors.replicas import replicas_of
from weft.doors.stack_memory import memory_of_ddp, memory_of_deepspeed, memory_of_fsdp2

NAME = "Axolotl"
_DEEPSPEED = "deepspeed"
_FSDP_OFFLOADS = ("fsdp_config.fsdp_offload_params", "fsdp_config.offload_params", "fsdp_config.cpu_offload")
_OTHER_JOBS = {
    "rl": "other passes than those of training on text are not modelled",
    "reward_model": "a model with another head is not modelled",
    "process_reward_model": "a model with another head is not modelled",
    "unfrozen_parameters": "gradients of a part of the weights are not modelled",
    "processor_type": "models of images or sound with text are not modelled",
    "use_onebitllms": "weights of few bits are not modelled",
}
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
    deepspeed = _deepspeed(given, name)
    values, keys = counts(given, AXOLOTL.counts, name)
    values.setdefault("micro_batches", 1)
    sizes, _ = counts(given, AXOLOTL.parts, name)
    sharding, tables = _sharding(given, sizes, deepspeed), low_rank_tables(given)
    adapters = incomparable_adapters(given, sharded=sharding == "zero-3")
    said = {
        "sharding": sharding,
        "recompute": _recompute(given),
        "schedule": "1f1b",
        "loops": 1,
        "loss": "fused" if _fused_losses(given) and values.get("tp", 1) == 1 else None,
    }
    configuration = Configuration(
        stack=NAME,
        given=given,
        optimizer=known_or_adamw(given.get("optimizer")),
        keys=keys,
        precision=_precision(given),
        clips=given.get("max_grad_norm", 1.0) not in (0, 0.0),
        launch="compiled" if truth(given.get("torch_compile")) else "eager",
        model=str(given["base_model"]) if given.get("base_model") else None,
        # A table whose adapter weft does not model would be that of another job.
        tables={} if adapters else tables,
        unpredicted=(
            *_unpredicted(given, divided=values.get("tp", 1) > 1),
            *paged_optimizer("optimizer", given.get("optimizer")),
            *unpredicted(deepspeed or {}),
            *(() if adapters else unpredicted_adapters(given)),
        ),
        memory=_memory(given, deepspeed, sharding, name),
        inside_nodes=_strategy(given) in HYBRID and deepspeed is None,
        incomparable=(*adapters, *_incomparable(given, deepspeed), *incomparable(deepspeed or {})),
    )
    return configuration.saying(said | values | replicas_of(sizes))


def _memory(
    given: Mapping[str, Any], deepspeed: Mapping[str, Any] | None, sharding: Sharding | None, name: str
) -> StatedMemory:
    if deepspeed is not None:
        return memory_of_deepspeed(deepspeed, sharding, 1, str(given[_DEEPSPEED]))
    return memory_of_ddp(given, name) if sharding == "zero-0" else memory_of_fsdp2(sharding)


def _deepspeed(given: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the keys of the DeepSpeed file that the YAML names or holds; None where there is none."""
    if _inside(given):
        start = f"{_DEEPSPEED}."
        return {key.removeprefix(start): value for key, value in given.items() if key.startswith(start)}
    return named(given[_DEEPSPEED], name) if given.get(_DEEPSPEED) else None


def _inside(given: Mapping[str, Any]) -> bool:
    return any(key.startswith(f"{_DEEPSPEED}.") for key in given)


def _sharding(
    given: Mapping[str, Any], sizes: Mapping[str, int], deepspeed: Mapping[str, Any] | None
) -> Sharding | None:
    if deepspeed is not None:
        return sharding_of(deepspeed)
    if given.get(_DEEPSPEED):
        return None
    if given.get("fsdp") or "fsdp_config" in given or sizes.get("shard", 1) > 1:
        strategy = STRATEGIES.get(_strategy(given))
        resharded = _of_fsdp(given, "reshard_after_forward")
        return strategy or ("zero-3" if resharded is None or truth(resharded) else "zero-2")
    return "zero-0"


def _strategy(given: Mapping[str, Any]) -> str:
    """Return FSDP1's strategy in capital letters."""
    return str(_of_fsdp(given, "sharding_strategy")).upper()


def _of_fsdp(given: Mapping[str, Any], name: str) -> Any:
    """Return a value of FSDP's section, whose keys older files begin with `fsdp_`."""
    return given.get(f"fsdp_config.{name}", given.get(f"fsdp_config.fsdp_{name}"))


def _recompute(given: Mapping[str, Any]) -> Recompute:
    checkpointing = given.get("gradient_checkpointing")
    offloaded = checkpointing in ("offload", "offload_disk", "unsloth")
    sharded = truth(_of_fsdp(given, "activation_checkpointing"))
    return "full" if truth(checkpointing) or offloaded or sharded else "none"


def _precision(given: Mapping[str, Any]) -> str | None:
    """Return the precision; `bf16: auto` takes the device's."""
    if truth(given.get("bf16")) or truth(given.get("bfloat16")) or given.get("bf16") in ("full", "auto"):
        return "bf16"
    if truth(given.get("fp16")) or truth(given.get("float16")):
        return "fp16"
    return "fp32" if given.get("bf16") is False else None


def _fused_losses(given: Mapping[str, Any]) -> list[str]:
    """Return the keys that replace the head and its cross entropy by one kernel."""
    key = "cut_cross_entropy"
    plugged = "CutCrossEntropy" in str(given.get("plugins")) and truth(given.get(key, True))
    liger = "liger_fused_linear_cross_entropy"
    return [liger] * truth(given.get(liger)) + [key] * (plugged or truth(given.get(key)))


def _unpredicted(given: Mapping[str, Any], *, divided: bool) -> list[str]:
    """Return the requests that weft does not predict; `divided`: tensor ranks divide the head."""
    found, fused = [], _fused_losses(given)
    if truth(given.get("sample_packing")):
        found.append("sample_packing: predicted as full samples of sequence_len tokens")
    others = [key for key in given if key.startswith("liger_") and truth(given[key]) and key not in fused]
    if others:
        found.append(f"{', '.join(others)}: predicted with unfused kernels, which take more time and memory")
    if fused and divided:
        found.append(f"{', '.join(fused)}: predicted with whole logits, which take more memory")
    elif "cut_cross_entropy" in fused:
        found.append("cut_cross_entropy: predicted with the fused loss of Liger Kernel")
    if truth(given.get("fp8")):
        found.append("fp8: predicted in the precision beside it")
    return found


def _incomparable(given: Mapping[str, Any], deepspeed: Mapping[str, Any] | None) -> list[str]:
    found = []
    if given.get(_DEEPSPEED) and deepspeed is None:
        found.append(absent(_DEEPSPEED, given[_DEEPSPEED]))
    for key in _FSDP_OFFLOADS:
        if truth(given.get(key)):
            found.append(f"{key}: weights and states in host memory are not modelled")
    if given.get("gradient_checkpointing") in ("offload", "offload_disk"):
        found.append("gradient_checkpointing offload: activations in host memory are not modelled")
    if not low_rank_tables(given):
        found += other_optimizer("optimizer", given.get("optimizer"))
    found += [
        f"{key} {shown(given[key])}: {problem}" for key, problem in _OTHER_JOBS.items() if given.get(key)
    ]
    if any(key.startswith("qat.") for key in given):
        found.append("qat: training with simulated quantisation is not modelled")
    return found
