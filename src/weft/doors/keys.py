"""The keys of each stack for the counts of a run: one table to read, write and check its files.

A stack has a block, and a count a row. Its modules in `explain` and `emit` handle the rest: sharding,
recomputation, the order of micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

# The names are a layout's decisions and a configuration's values, and two names for stacks alone: replicas
# are `replicate` groups of `shard` ranks that share states, and `local_batch` is the batch of a replica.
Ranks = Literal["devices", "pp", "tp", "cp", "replicate", "shard"]
Samples = Literal["micro_batch_size", "micro_batches", "local_batch", "global_batch", "sequence"]
Name = Ranks | Samples
Names = Mapping[Name, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of one stack, dotted; of several keys for one count the first given one is read.

    Attributes:
        counts: plain counts, in the order in which mistakes are listed.
        parts: counts that the stack's own code reads, since their meaning depends on other keys.
        written: counts that emitters write, by first key, in the order of the files; others are only read.
        in_words: decisions that emitters write otherwise than as a count.
    """

    counts: Names
    parts: Names
    written: Sequence[Name] = ()
    in_words: frozenset[str] = frozenset()

    def only(self, *names: Name) -> Names:
        """Return all keys of these counts."""
        return {name: self.counts.get(name) or self.parts[name] for name in names}

    def key(self, name: Name, section: str = "") -> str:
        """Return the first key of a count in a section of the file."""
        return next(key for key in self.only(name)[name] if key.startswith(section))

    def written_in(self, section: str = "") -> dict[Name, str]:
        """Return the keys to write in a section, by count."""
        rows = self.only(*self.written).items()
        found = {name: [key for key in row if key.startswith(section)] for name, row in rows}
        return {name: keys[0] for name, keys in found.items() if keys}

    def values(self, values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
        """Return these values in a section's form, by the rest of the key; None is left out."""
        keys = self.written_in(section).items()
        return {key.removeprefix(section): values[name] for name, key in keys if values.get(name) is not None}

    def expressed(self, section: str = "") -> frozenset[str]:
        """Return the decisions that a file or its section can express; groups of replicas are islands."""
        written = {*self.written_in(section)}
        return self.in_words | written | ({"island"} if "replicate" in written else set())


DEEPSPEED = Keys(
    counts={
        "micro_batch_size": ("train_micro_batch_size_per_gpu",),
        "micro_batches": ("gradient_accumulation_steps",),
        "global_batch": ("train_batch_size",),
        "pp": ("pipeline.stages",),
        "tp": ("tensor_parallel.autotp_size", "tensor_parallel.tp_size"),
        "cp": ("sequence_parallel_size",),
    },
    # Removed in DeepSpeed 0.19.8.
    parts={"shard": ("zero_optimization.mics_shard_size",)},
    written=("global_batch", "micro_batch_size", "micro_batches", "pp", "tp", "cp"),
    in_words=frozenset({"sharding", "recompute"}),
)

# Sections of Accelerate's YAML, with the beginning of their keys.
IN_SIZES = "parallelism_config.parallelism_config_"
IN_MEGATRON = "megatron_lm_config.megatron_lm_"
IN_DEEPSPEED = "deepspeed_config."
ACCELERATE = Keys(
    counts={
        "devices": ("num_processes",),
        "pp": (f"{IN_MEGATRON}pp_degree",),
        "tp": (f"{IN_MEGATRON}tp_degree", f"{IN_SIZES}tp_size", "tp_config.tp_size"),
        "cp": (f"{IN_SIZES}cp_size", f"{IN_MEGATRON}context_parallel_size"),
        "micro_batches": (f"{IN_MEGATRON}num_micro_batches", f"{IN_DEEPSPEED}gradient_accumulation_steps"),
    },
    parts={"replicate": (f"{IN_SIZES}dp_replicate_size",), "shard": (f"{IN_SIZES}dp_shard_size",)},
    written=("devices", "replicate", "shard", "tp", "pp", "micro_batches", "cp"),
    in_words=frozenset({"sharding", "recompute"}),
)
# The other way to divide a sample.
ULYSSES = f"{IN_SIZES}sp_size"
ACCELERATE_ULYSSES = replace(ACCELERATE, counts={**ACCELERATE.counts, "cp": (ULYSSES,)})

AXOLOTL = Keys(
    counts={
        "micro_batch_size": ("micro_batch_size",),
        "micro_batches": ("gradient_accumulation_steps",),
        "sequence": ("sequence_len",),
        "tp": ("tensor_parallel_size",),
        "cp": ("context_parallel_size", "sequence_parallel_degree"),
    },
    parts={"shard": ("dp_shard_size",), "replicate": ("dp_replicate_size",)},
)

TORCHTITAN = Keys(
    counts={
        "pp": ("parallelism.pipeline_parallel_degree",),
        "tp": ("parallelism.tensor_parallel_degree",),
        "cp": ("parallelism.context_parallel_degree",),
        "global_batch": ("training.global_batch_size",),
        "sequence": ("training.seq_len",),
    },
    parts={
        "replicate": ("parallelism.data_parallel_replicate_degree",),
        "shard": ("parallelism.data_parallel_shard_degree",),
        "local_batch": ("training.local_batch_size", "training.batch_size"),
        "micro_batch_size": ("parallelism.pipeline_parallel_microbatch_size",),
    },
    written=(
        *("local_batch", "global_batch", "sequence"),
        *("replicate", "shard", "tp", "cp", "pp", "micro_batch_size"),
    ),
    in_words=frozenset({"sharding", "recompute"}),
)
# Degrees that cannot be -1, which stands for the remaining ranks.
NOT_LEFT_OVER: tuple[Name, ...] = ("tp", "pp", "cp", "replicate")

MEGATRON_LM = Keys(
    counts={
        "pp": ("--pipeline-model-parallel-size",),
        "tp": ("--tensor-model-parallel-size", "--model-parallel-size"),
        "cp": ("--context-parallel-size",),
        "micro_batch_size": ("--micro-batch-size",),
        "global_batch": ("--global-batch-size",),
        "sequence": ("--seq-length",),
    },
    parts={"replicate": ("--num-distributed-optimizer-instances",)},
    written=("tp", "pp", "cp", "micro_batch_size", "global_batch", "sequence", "replicate"),
    in_words=frozenset({"sharding", "recompute", "blocking"}),
)

# All keys that weft reads or that are like one of them, by the name of the stack.
READ_KEYS: Mapping[str, frozenset[str]] = {
    stack: frozenset(key for row in {**keys.counts, **keys.parts}.values() for key in row).union(others)
    for stack, keys, others in (
        (
            "DeepSpeed",
            DEEPSPEED,
            (
                *("zero_optimization", "zero_optimization.stage", "zero_optimization.overlap_comm"),
                *("zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size"),
                *("bf16.enabled", "fp16.enabled", "gradient_clipping", "optimizer.type"),
            ),
        ),
        (
            "Accelerate",
            ACCELERATE,
            (
                *(
                    "distributed_type",
                    "mixed_precision",
                    "num_machines",
                    "deepspeed_config.zero_stage",
                    ULYSSES,
                ),
                *("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_activation_checkpointing"),
                *("fsdp_config.fsdp_reshard_after_forward", "fsdp_config.fsdp_offload_params"),
            ),
        ),
        (
            "Axolotl",
            AXOLOTL,
            (
                *("gradient_checkpointing", "sample_packing", "optimizer", "adapter", "deepspeed", "fsdp"),
                *("load_in_8bit", "load_in_4bit", "max_grad_norm", "torch_compile"),
            ),
        ),
        (
            "torchtitan",
            TORCHTITAN,
            (
                *("parallelism.pipeline_parallel_schedule", "parallelism.fsdp_reshard_after_forward"),
                *("parallelism.expert_parallel_degree", "activation_checkpoint.mode", "optimizer.name"),
                *("training.mixed_precision_param", "model.flavor"),
            ),
        ),
        ("Megatron-LM", MEGATRON_LM, ()),
    )
}
