"""Rules for Accelerate's YAML."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from weft.doors.checks.base import Finding, Rule, idle, nearest_multiple, number, on, slow, wrong
from weft.doors.configuration import Configuration

_SIZES = "parallelism_config.parallelism_config_"
_MEGATRON = "megatron_lm_config.megatron_lm_"
_FSDP = "fsdp_config.fsdp_"
_AXES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
# Each plugin's section.
_SECTIONS = {
    "FSDP": "fsdp_config",
    "DEEPSPEED": "deepspeed_config",
    "MEGATRON_LM": "megatron_lm_config",
}
# What FSDP2 replaced or does not read.
_ONLY_FIRST = (
    "sharding_strategy",
    "backward_prefetch",
    "forward_prefetch",
    "use_orig_params",
    "sync_module_states",
)


def _kind(configuration: Configuration) -> str:
    return str(configuration.given.get("distributed_type", "NO")).upper()


def _sizes(configuration: Configuration) -> dict[str, int]:
    return {axis: number(configuration.given, f"{_SIZES}{axis}", 1) or 1 for axis in _AXES}


def processes_fill_machines(configuration: Configuration) -> Iterator[Finding]:
    """Every machine starts as many processes."""
    machines = number(configuration.given, "num_machines", 1) or 1
    devices = configuration.devices
    if devices is not None and devices % machines:
        near = str(nearest_multiple(devices, machines))
        yield wrong("num_processes", f"{devices} processes on {machines} machines, not as many on each", near)
    if devices is not None and devices > 1 and _kind(configuration) == "NO":
        yield wrong("distributed_type", f"NO with {devices} processes", "MULTI_GPU")


def sizes_make_processes(configuration: Configuration) -> Iterator[Finding]:
    """The product of the axes is the number of processes."""
    sizes, devices = _sizes(configuration), configuration.devices
    if devices is None or not any(key.startswith(_SIZES) for key in configuration.given):
        return
    product = prod(sizes.values())
    if product != devices:
        terms = " x ".join(f"{axis.removesuffix('_size')} {size}" for axis, size in sizes.items())
        yield wrong("num_processes", f"{devices}; {terms} = {product}", str(product))


def replicas_of_tensor_groups_share(configuration: Configuration) -> Iterator[Finding]:
    """Accelerate refuses whole replicas of tensor or context groups."""
    sizes = _sizes(configuration)
    divided = sizes["tp_size"] > 1 or sizes["cp_size"] > 1
    if divided and sizes["dp_replicate_size"] > 1 and sizes["dp_shard_size"] == 1:
        problem = f"{sizes['dp_replicate_size']} with tp or cp and nothing shared out"
        near = f"1, and {_SIZES}dp_shard_size {sizes['dp_replicate_size']}"
        yield wrong(f"{_SIZES}dp_replicate_size", problem, near)


def sections_of_other_plugins(configuration: Configuration) -> Iterator[Finding]:
    """Only the section of the plugin in use is read."""
    kind = _kind(configuration)
    for plugin, section in _SECTIONS.items():
        used = any(key.startswith(f"{section}.") for key in configuration.given)
        if used and kind != plugin:
            yield idle(section, f"read with distributed_type {plugin} only; it is {kind}", plugin)


def keys_of_the_version(configuration: Configuration) -> Iterator[Finding]:
    """FSDP2 has one way to shard; FSDP1 has no resharding and no further axes."""
    given = configuration.given
    if _kind(configuration) != "FSDP":
        return
    version = number(given, f"{_FSDP}version", 1)
    if version == 2:
        for key in (f"{_FSDP}{name}" for name in _ONLY_FIRST):
            if key in given:
                near = f"{_FSDP}reshard_after_forward" if key.endswith("strategy") else "leave it out"
                yield idle(key, "FSDP1's; fsdp_version is 2", near)
        return
    if any(key.startswith(_SIZES) for key in given):
        yield wrong("parallelism_config", f"needs FSDP2; fsdp_version is {version}", f"{_FSDP}version: 2")
    key = f"{_FSDP}reshard_after_forward"
    if key in given and str(given[key]).lower() in ("true", "false"):
        yield idle(key, f"FSDP2's; fsdp_version is {version}", f"{_FSDP}version: 2")


def defaults_of_megatron(configuration: Configuration) -> Iterator[Finding]:
    """Since Accelerate 1.13 the plugin has two context ranks and full recomputation where nothing is said."""
    if _kind(configuration) != "MEGATRON_LM":
        return
    key = f"{_MEGATRON}context_parallel_size"
    if key not in configuration.given:
        yield slow(key, "not given; Accelerate 1.13 and later then take 2 context ranks", f"{key}: 1")
    key = f"{_MEGATRON}recompute_granularity"
    if key not in configuration.given:
        problem = "not given; Accelerate 1.13 and later then recompute everything"
        yield slow(key, problem, "other_megatron_args={'recompute_granularity': None} in the program")


def one_source_for_deepspeed(configuration: Configuration) -> Iterator[Finding]:
    """Keys that the named DeepSpeed file holds must not be given again."""
    section = "deepspeed_config."
    if f"{section}deepspeed_config_file" not in configuration.given:
        return
    twice = ("zero_stage", "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device")
    for key in (f"{section}{name}" for name in twice):
        if key in configuration.given:
            yield wrong(key, "given beside deepspeed_config_file, which says it", "leave it out")


def products_in_low_precision(configuration: Configuration) -> Iterator[Finding]:
    """Devices multiply in fp32 at a fraction of what they do in bf16."""
    precise = configuration.given.get("mixed_precision", "no") in ("no", False)
    if precise and not on(configuration.given, "use_cpu") and (configuration.devices or 1) > 1:
        yield slow("mixed_precision", "no: products in fp32", "bf16, where the devices have it")


RULES: tuple[Rule, ...] = (
    processes_fill_machines,
    sizes_make_processes,
    replicas_of_tensor_groups_share,
    sections_of_other_plugins,
    keys_of_the_version,
    defaults_of_megatron,
    one_source_for_deepspeed,
    products_in_low_precision,
)
