"""The keys of other stacks for the counts of a run, beside weft's own: tables made of `weft.doors.keys`."""

from __future__ import annotations

from collections.abc import Mapping

from weft.doors.keys import ACCELERATE, ACCELERATE_ULYSSES, DEEPSPEED, MEGATRON_LM, TORCHTITAN, Keys, Name

# Keys of a run file, and what a count is.
WEFT: Mapping[Name, tuple[str, str]] = {
    "devices": ("`cluster.use`", "ranks of the job"),
    "pp": ("`plan.pp`", "pipeline-parallel ranks"),
    "tp": ("`plan.tp`", "tensor-parallel ranks"),
    "cp": ("`plan.cp`", "context-parallel ranks"),
    "replicate": ("`plan.dp` / `plan.island`", "groups of replicas; those of one group share states"),
    "shard": ("`plan.island`; all of `plan.dp` without it", "replicas of a group"),
    "global_batch": ("`train.global_batch`", "samples of an optimizer step"),
    "local_batch": (
        "`plan.micro_batch_size`, with a pipeline its replica's whole batch",
        "samples of a rank",
    ),
    "micro_batch_size": ("`plan.micro_batch_size`", "samples of a micro-batch of a replica"),
    "micro_batches": (
        "`train.global_batch` / (`plan.dp` x `plan.micro_batch_size`)",
        "micro-batches of a step and replica",
    ),
    "sequence": ("`task.sequence`", "tokens of a sample"),
}
STACKS: Mapping[str, tuple[Keys, ...]] = {
    "Megatron-LM": (MEGATRON_LM,),
    "torchtitan": (TORCHTITAN,),
    "DeepSpeed": (DEEPSPEED,),
    "Accelerate": (ACCELERATE, ACCELERATE_ULYSSES),
}


def rows(stack: str) -> list[tuple[str, str, str]]:
    """Return the keys of a stack, those of weft and the meaning, by count."""
    found: dict[Name, list[str]] = {}
    for keys in STACKS[stack]:
        for name, spelled in {**keys.counts, **keys.parts}.items():
            known = found.setdefault(name, [])
            known += [key for key in spelled if key not in known]
    return [(", ".join(f"`{key}`" for key in found[name]), *WEFT[name]) for name in WEFT if name in found]
