"""Rules for Megatron-LM's options: those of its own validation, and faults without its warning."""

from __future__ import annotations

from collections.abc import Iterator

from weft.doors.checks.base import (
    Finding,
    Rule,
    buckets_are_parts,
    idle,
    nearest_divisor,
    nearest_multiple,
    number,
    slow,
    wrong,
)
from weft.doors.configuration import Configuration
from weft.doors.keys import MEGATRON_LM

_SPLITS = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
)
_PIPELINE = MEGATRON_LM.key("pp")
_UNEVEN = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)


def one_precision(configuration: Configuration) -> Iterator[Finding]:
    """Check that --fp16 and --bf16 are not both given."""
    if "--fp16" in configuration.given and "--bf16" in configuration.given:
        yield wrong("--fp16", "given with --bf16; one is allowed", "--bf16")


def layers_fill_stages(configuration: Configuration) -> Iterator[Finding]:
    """Check that stages have equally many layers, unless a layout says otherwise."""
    given, stages = configuration.given, configuration.layout.pp or 1
    splits = [key for key in _SPLITS if key in given]
    if len(splits) > 1:
        yield wrong(splits[1], f"given with {splits[0]}; one is allowed", "leave one out")
    layers = number(given, "--num-layers")
    if layers is None or _SPLITS[2] in given or any(key in given for key in _UNEVEN):
        return
    if layers % stages:
        near = str(nearest_divisor(stages, layers))
        key = configuration.key("pp")
        yield wrong(key, f"{stages} stages do not divide {layers} layers", f"{near}, or {_SPLITS[2]}")
        return
    each = number(given, _SPLITS[0])
    if each is not None and stages > 1 and (each < 1 or (layers // stages) % each):
        near = str(nearest_divisor(each, layers // stages))
        yield wrong(_SPLITS[0], f"{each} does not divide the {layers // stages} layers of a device", near)


def loops_need_a_pipeline(configuration: Configuration) -> Iterator[Finding]:
    """Check that several stages per device have two devices, or three where messages do not overlap."""
    given, stages = configuration.given, configuration.layout.pp or 1
    split = next((key for key in _SPLITS[:2] if key in given), None)
    if split is None:
        return
    # A part of a command line leaves the sizes of the model and the pipeline to another part.
    whole = _PIPELINE in given or "--num-attention-heads" in given
    if stages == 1 and whole:
        yield wrong(split, "needs a pipeline; its size is 1", f"{_PIPELINE} 2")
    elif stages == 2 and "--no-overlap-p2p-communication" in given:
        problem = "a looped pipeline of 2 devices without overlapped messages"
        yield wrong("--no-overlap-p2p-communication", problem, "leave it out")


def groups_fill_loops(configuration: Configuration) -> Iterator[Finding]:
    """Check that groups of micro-batches are from pp to all, and a rest is no smaller than pp."""
    given, stages = configuration.given, configuration.layout.pp or 1
    batch, unit = configuration.global_batch, configuration.samples_per_round
    if (configuration.layout.loops or 1) == 1 or stages == 1 or batch is None or unit is None:
        return
    count = batch // unit
    key = "--microbatch-group-size-per-virtual-pipeline-stage"
    group = number(given, key, stages) or stages
    if not stages <= group <= max(count, stages):
        yield wrong(
            key, f"{group}: pp {stages} to {count} micro-batches", str(min(max(group, stages), count))
        )
    elif 0 < count % group < stages:
        near = nearest_multiple(count, group) * unit
        problem = f"{count} micro-batches in groups of {group} leave {count % group}, fewer than pp {stages}"
        yield wrong(MEGATRON_LM.key("global_batch"), problem, str(near))


def overlap_needs_owners(configuration: Configuration) -> Iterator[Finding]:
    """Check that overlapped gathers have sharded states and overlapped reductions."""
    given, key = configuration.given, "--overlap-param-gather"
    if key not in given:
        return
    if configuration.layout.sharding == "zero-0":
        yield wrong(key, "needs states that are shared out", "--use-distributed-optimizer")
    if "--overlap-grad-reduce" not in given:
        yield wrong(key, "needs --overlap-grad-reduce", "--overlap-grad-reduce")


def reductions_overlap(configuration: Configuration) -> Iterator[Finding]:
    """Find reductions that wait for the whole backward pass, by choice or by too large buckets."""
    replicas = configuration.replicas or 1
    if replicas > 1 and "reductions" in (configuration.layout.blocking or ()):
        problem = f"not given: {replicas} replicas reduce gradients while nothing is computed"
        yield slow("--overlap-grad-reduce", problem, "--overlap-grad-reduce")
    yield from buckets_are_parts(configuration, "--ddp-bucket-size", 1, configuration.layout.replica_ranks)


def recomputation_is_whole(configuration: Configuration) -> Iterator[Finding]:
    """Check that full recomputation has a method, and selective none."""
    given = configuration.given
    granularity, method = given.get("--recompute-granularity"), given.get("--recompute-method")
    if granularity == "full" and method is None:
        yield wrong(
            "--recompute-granularity", "full without --recompute-method", "--recompute-method uniform"
        )
    if granularity == "selective" and method is not None:
        yield wrong("--recompute-method", f"{method} with granularity selective", "leave it out")
    if granularity is None and "--recompute-activations" not in given and method is not None:
        near = "--recompute-granularity full"
        yield idle("--recompute-method", f"{method} without --recompute-granularity", near)
    if "--distribute-saved-activations" in given and "--sequence-parallel" in given:
        problem = "given with --sequence-parallel, which divides them already"
        yield wrong("--distribute-saved-activations", problem, "leave it out")


def sequence_goes_with_tensor(configuration: Configuration) -> Iterator[Finding]:
    """Find tensor ranks that do not divide norms: dividing holds less and sends equally much."""
    tensor, given = configuration.layout.tp or 1, configuration.given
    if tensor > 1 and "--sequence-parallel" not in given:
        problem = f"not given: each of {tensor} tensor ranks keeps all tokens of norms and residuals"
        yield slow("--sequence-parallel", problem, "--sequence-parallel")
    if tensor == 1 and "--sequence-parallel" in given:
        yield idle("--sequence-parallel", "divides over tensor ranks; there is 1", "leave it out")


def groups_of_queries(configuration: Configuration) -> Iterator[Finding]:
    """Check that query groups are switched on, else they have no effect."""
    given = configuration.given
    if "--num-query-groups" in given and "--group-query-attention" not in given:
        yield idle("--num-query-groups", "read with --group-query-attention only", "--group-query-attention")


def sharded_checkpoints(configuration: Configuration) -> Iterator[Finding]:
    """Check that Megatron FSDP has its checkpoint format and a strategy; without one it shards nothing."""
    given = configuration.given
    if "--use-megatron-fsdp" not in given:
        return
    if given.get("--ckpt-format") != "fsdp_dtensor":
        yield wrong("--ckpt-format", "Megatron FSDP saves fsdp_dtensor only", "--ckpt-format fsdp_dtensor")
    if "--data-parallel-sharding-strategy" not in given:
        near = "--data-parallel-sharding-strategy optim_grads_params"
        yield idle("--use-megatron-fsdp", "shares nothing without a strategy", near)


RULES: tuple[Rule, ...] = (
    one_precision,
    layers_fill_stages,
    loops_need_a_pipeline,
    groups_fill_loops,
    overlap_needs_owners,
    reductions_overlap,
    recomputation_is_whole,
    sequence_goes_with_tensor,
    groups_of_queries,
    sharded_checkpoints,
)
