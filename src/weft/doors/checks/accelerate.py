"""Rules for Accelerate's YAML."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from weft.describe.units import counted
from weft.doors.checks.base import Finding, Rule, idle, nearest_multiple, number, on, slow, wrong
from weft.doors.configuration import Configuration
from weft.doors.explain.accelerate import STRATEGIES, STRATEGY, plugin
from weft.doors.keys import ACCELERATE, IN_DEEPSPEED, IN_MEGATRON, IN_SIZES, ULYSSES
from weft.errors import nearest

_FSDP = "fsdp_config.fsdp_"
# Each plugin's section.
_SECTIONS = {
    "FSDP": "fsdp_config",
    "DEEPSPEED": "deepspeed_config",
    "MEGATRON_LM": "megatron_lm_config",
}
# Keys that FSDP2 replaced or does not read.
_ONLY_FIRST = (
    "sharding_strategy",
    "backward_prefetch",
    "forward_prefetch",
    "use_orig_params",
    "sync_module_states",
)


# The words of keys that have few; capitals do not count, and `no` of YAML is false.
_WORDS = {
    "distributed_type": (
        *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU"),
        *("MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "TPU", "MEGATRON_LM", "DATA_PARALLEL"),
        *("MODEL_PARALLEL", "FALSE"),
    ),
    "mixed_precision": ("no", "fp16", "bf16", "fp8", "False"),
    STRATEGY: tuple(STRATEGIES),
}
# Other keys at the top are refused.
_TOP = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug"),
    *("num_processes", "machine_rank", "num_machines", "gpu_ids", "main_process_ip"),
    *("main_process_port", "rdzv_backend", "same_network", "main_training_function"),
    *("enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config", "tp_config"),
    *("parallelism_config", "megatron_lm_config", "ipex_config", "mpirun_config", "downcast_bf16"),
    *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands"),
    *("tpu_vm", "tpu_env", "dynamo_config", "fp16", "dynamo_backend"),
)


def words_are_known(configuration: Configuration) -> Iterator[Finding]:
    """Check the words of keys that have few, and that no other keys stand at the top."""
    given = configuration.given
    for key, words in _WORDS.items():
        word = str(given.get(key))
        if given.get(key) is not None and word.lower() not in map(str.lower, words):
            yield wrong(key, f"{given[key]!r} is not known", nearest(word, words) or words[0])
    if given.get("compute_environment", "LOCAL_MACHINE") == "LOCAL_MACHINE":
        for key in given:
            if "." not in key and key not in _TOP:
                yield wrong(key, "no key of the file; Accelerate refuses it", nearest(key, _TOP))


def processes_fill_machines(configuration: Configuration) -> Iterator[Finding]:
    """Check that every machine starts equally many processes."""
    machines = number(configuration.given, "num_machines", 1) or 1
    devices = configuration.devices
    if devices is not None and devices % machines:
        near = str(nearest_multiple(devices, machines))
        problem = f"{counted(devices, 'process')} on {counted(machines, 'machine')}, not as many on each"
        yield wrong(ACCELERATE.key("devices"), problem, near)
    if devices is not None and devices > 1 and plugin(configuration.given) == "NO":
        yield wrong("distributed_type", f"NO with {devices} processes", "MULTI_GPU")


def sizes_make_processes(configuration: Configuration) -> Iterator[Finding]:
    """Check that the product of the axes is the number of processes."""
    given, devices = configuration.given, configuration.devices
    if devices is None or not any(key.startswith(IN_SIZES) for key in given):
        return
    sizes = {key: number(given, key, 1) or 1 for key in (*ACCELERATE.written_in(IN_SIZES).values(), ULYSSES)}
    product = prod(sizes.values())
    if product != devices:
        axes = (f"{key.removeprefix(IN_SIZES).removesuffix('_size')} {size}" for key, size in sizes.items())
        yield wrong(ACCELERATE.key("devices"), f"{devices}; {' x '.join(axes)} = {product}", str(product))


def sections_of_other_plugins(configuration: Configuration) -> Iterator[Finding]:
    """Find sections of plugins that are not in use; nothing reads them."""
    kind = plugin(configuration.given)
    for name, section in _SECTIONS.items():
        used = any(key.startswith(f"{section}.") for key in configuration.given)
        if used and kind != name:
            yield idle(section, f"read with distributed_type {name} only; it is {kind}", name)


def keys_of_the_version(configuration: Configuration) -> Iterator[Finding]:
    """Check keys by version: FSDP2 has one way to shard; FSDP1 has no resharding and no further axes."""
    given = configuration.given
    if plugin(given) != "FSDP":
        return
    version = number(given, f"{_FSDP}version", 1)
    if version == 2:
        for key in (f"{_FSDP}{name}" for name in _ONLY_FIRST):
            if key in given:
                near = f"{_FSDP}reshard_after_forward" if key.endswith("strategy") else "leave it out"
                yield idle(key, "FSDP1's; fsdp_version is 2", near)
        return
    if any(key.startswith(IN_SIZES) for key in given):
        yield wrong("parallelism_config", f"needs FSDP2; fsdp_version is {version}", f"{_FSDP}version: 2")
    key = f"{_FSDP}reshard_after_forward"
    if key in given and str(given[key]).lower() in ("true", "false"):
        yield idle(key, f"FSDP2's; fsdp_version is {version}", f"{_FSDP}version: 2")


def recomputation_by_default(configuration: Configuration) -> Iterator[Finding]:
    """Find full recomputation by default, in Megatron-LM's plugin since Accelerate 1.13."""
    key = f"{IN_MEGATRON}recompute_granularity"
    if plugin(configuration.given) == "MEGATRON_LM" and key not in configuration.given:
        problem = "not given; Accelerate 1.13 and later then recompute everything"
        yield slow(key, problem, "other_megatron_args={'recompute_granularity': None} in the program")


def one_source_for_deepspeed(configuration: Configuration) -> Iterator[Finding]:
    """Find keys that repeat keys of the named DeepSpeed file; this is not allowed."""
    section = IN_DEEPSPEED
    if f"{section}deepspeed_config_file" not in configuration.given:
        return
    words = (f"{section}{word}" for word in ("gradient_clipping", "offload_optimizer_device"))
    for key in (f"{section}zero_stage", *ACCELERATE.written_in(section).values(), *words):
        if key in configuration.given:
            yield wrong(key, "given beside deepspeed_config_file, which says it", "leave it out")


def products_in_low_precision(configuration: Configuration) -> Iterator[Finding]:
    """Find products in fp32: devices multiply at a fraction of their bf16 speed."""
    precise = configuration.given.get("mixed_precision", "no") in ("no", False)
    if precise and not on(configuration.given, "use_cpu") and (configuration.devices or 1) > 1:
        yield slow("mixed_precision", "no: products in fp32", "bf16, where the devices have it")


def replicas_of_groups_share(configuration: Configuration) -> Iterator[Finding]:
    """Find whole replicas of tensor or context groups, which Accelerate refuses."""
    keys = {name: ACCELERATE.key(name, IN_SIZES) for name in ("replicate", "shard", "tp", "cp")}
    sizes = {name: number(configuration.given, key, 1) or 1 for name, key in keys.items()}
    divided, replicas = sizes["tp"] > 1 or sizes["cp"] > 1, sizes["replicate"]
    if divided and replicas > 1 and sizes["shard"] == 1:
        problem = f"{replicas} with tp or cp and nothing shared out"
        yield wrong(keys["replicate"], problem, f"1, and {keys['shard']} {replicas}")


def ranks_by_default(configuration: Configuration) -> Iterator[Finding]:
    """Find two context ranks by default, in Megatron-LM's plugin since Accelerate 1.13."""
    key = ACCELERATE.key("cp", IN_MEGATRON)
    if plugin(configuration.given) == "MEGATRON_LM" and key not in configuration.given:
        yield slow(key, "not given; Accelerate 1.13 and later then take 2 context ranks", f"{key}: 1")


RULES: tuple[Rule, ...] = (
    words_are_known,
    processes_fill_machines,
    sizes_make_processes,
    replicas_of_groups_share,
    sections_of_other_plugins,
    keys_of_the_version,
    ranks_by_default,
    recomputation_by_default,
    one_source_for_deepspeed,
    products_in_low_precision,
)
