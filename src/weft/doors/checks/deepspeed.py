"""Rules for DeepSpeed's JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator

from weft.doors.checks.base import Finding, Rule, buckets_are_parts, idle, number, on, slow, wrong
from weft.doors.configuration import Configuration
from weft.doors.keys import DEEPSPEED
from weft.doors.stack_memory import overlaps_collectives

_ZERO = "zero_optimization."
_STAGE = f"{_ZERO}stage"
# Sections, with the key in them whose value people write in their place.
_SECTIONS = {
    "zero_optimization": "stage",
    **dict.fromkeys(("bf16", "fp16", "tensorboard", "flops_profiler"), "enabled"),
    **dict.fromkeys(("optimizer", "scheduler"), "type"),
}
# Keys that DeepSpeed 0.19.8 refuses to start with.
_REMOVED = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
    DEEPSPEED.key("shard"),
    f"{_ZERO}mics_hierarchical_params_gather",
    f"{_ZERO}zeropp_loco_param",
)


def _stage(configuration: Configuration) -> int:
    return number(configuration.given, _STAGE, 0) or 0


def one_precision(configuration: Configuration) -> Iterator[Finding]:
    """Check that only one of fp16, bf16 and amp is on."""
    names = [
        name for name in ("bf16", "bfloat16", "fp16", "amp") if on(configuration.given, f"{name}.enabled")
    ]
    if len(names) > 1:
        problem = f"{' and '.join(names)} are both enabled; one is allowed"
        yield wrong(f"{names[-1]}.enabled", problem, "false")


def sections_are_tables(configuration: Configuration) -> Iterator[Finding]:
    """Check that sections are tables: DeepSpeed reads nothing of another value."""
    for key, word in _SECTIONS.items():
        if (given := configuration.given.get(key)) not in (None, {}):
            yield wrong(key, f"{given!r} is no table", json.dumps({word: given}))


def batch_is_given(configuration: Configuration) -> Iterator[Finding]:
    """Check that one of the three batch sizes, other than accumulation, is given."""
    batch, size = DEEPSPEED.key("global_batch"), DEEPSPEED.key("micro_batch_size")
    if not {batch, size} & set(configuration.given):
        yield wrong(batch, f"neither {batch} nor {size} is given", size)


def stage_is_known(configuration: Configuration) -> Iterator[Finding]:
    """Check that ZeRO's stage is 0 to 3."""
    given = configuration.given.get(_STAGE, 0)
    if given not in (0, 1, 2, 3):
        yield wrong(_STAGE, f"{given!r}: 0, 1, 2 or 3", "3")


def pipeline_shares_states_only(configuration: Configuration) -> Iterator[Finding]:
    """Check that the stage is below 2 with a pipeline, as its engine asserts."""
    stages, stage = configuration.layout.pp or 1, _stage(configuration)
    if stages > 1 and stage > 1:
        problem = f"stage {stage} with a pipeline of {stages}; its engine takes 0 and 1"
        yield wrong(_STAGE, problem, "1")


def tensor_ranks_hold_weights(configuration: Configuration) -> Iterator[Finding]:
    """Check that automatic tensor parallelism has stage 2 at most."""
    if (configuration.layout.tp or 1) > 1 and _stage(configuration) > 2:
        yield wrong(_STAGE, "stage 3 with tensor ranks (autotp_size); up to 2 is allowed", "2")


def offload_needs_a_stage(configuration: Configuration) -> Iterator[Finding]:
    """Check the stage for offloading: weights need stage 3, optimizer states any stage but 0."""
    stage = _stage(configuration)
    for part, least in (("param", 3), ("optimizer", 1)):
        key = f"{_ZERO}offload_{part}.device"
        if configuration.given.get(key) in ("cpu", "nvme") and stage < least:
            near = f"{_STAGE} {least}"
            yield wrong(key, f"{configuration.given[key]!r} with stage {stage}; needs at least {least}", near)
    if on(configuration.given, f"{_ZERO}cpu_offload"):
        key = f"{_ZERO}cpu_offload"
        yield wrong(key, "replaced by offload_optimizer", 'offload_optimizer: {"device": "cpu"}')


def offload_costs_time(configuration: Configuration) -> Iterator[Finding]:
    """Find states on the host: they cross the bus in every step."""
    for part in ("param", "optimizer"):
        key = f"{_ZERO}offload_{part}.device"
        if configuration.given.get(key) in ("cpu", "nvme"):
            problem = f"{configuration.given[key]!r}: every step moves them over the host's bus"
            yield slow(key, problem, "'none' where the prediction below fits")


def keys_of_stage_3(configuration: Configuration) -> Iterator[Finding]:
    """Find keys for stage 3 with a lower stage; these have no effect."""
    stage = _stage(configuration)
    if stage >= 3:
        return
    words = ("stage3_", "mics_", "zero_hpz_", "zero_quantized_weights")
    for key in configuration.given:
        if key.startswith(_ZERO) and key.removeprefix(_ZERO).startswith(words):
            yield idle(key, f"read with stage 3 only; stage is {stage}", f"{_STAGE} 3")


def removed_keys(configuration: Configuration) -> Iterator[Finding]:
    """Find keys of removed features; they are refused even where they switch the feature off."""
    for key in _REMOVED:
        if any(given == key or given.startswith(f"{key}.") for given in configuration.given):
            yield wrong(key, "removed; DeepSpeed 0.19.8 and later refuse it", "leave it out")


def reductions_overlap(configuration: Configuration) -> Iterator[Finding]:
    """Find reductions that wait for the whole backward pass, by choice or because all fits one bucket."""
    stage, given = _stage(configuration), configuration.given
    key = f"{_ZERO}overlap_comm"
    waits = stage in (1, 2, 3) and not overlaps_collectives(given, configuration.layout.sharding)
    # The engine of a pipeline reduces last where nothing is said, too.
    if waits and (key in given or (configuration.layout.pp or 1) == 1):
        said = "false" if key in given else "not given"
        yield slow(key, f"{said}: gradients are reduced while nothing is computed", "true")
        return
    if stage != 0:
        tensor, stages = configuration.layout.tp or 1, configuration.layout.pp or 1
        yield from buckets_are_parts(configuration, f"{_ZERO}reduce_bucket_size", tensor, stages)


def scaling_is_for_fp16(configuration: Configuration) -> Iterator[Finding]:
    """Find loss scaling without fp16."""
    for key in configuration.given:
        if key.startswith("bf16.") and "loss_scale" in key:
            yield idle(key, "losses are scaled in fp16 only", "leave it out")


RULES: tuple[Rule, ...] = (
    sections_are_tables,
    one_precision,
    batch_is_given,
    stage_is_known,
    pipeline_shares_states_only,
    tensor_ranks_hold_weights,
    offload_needs_a_stage,
    offload_costs_time,
    keys_of_stage_3,
    removed_keys,
    reductions_overlap,
    scaling_is_for_fp16,
)
