"""Megatron-LM: a shell script with one `torchrun` command line.

Option names come from `megatron/training/arguments.py`. The order of ranks is the same: tensor ranks
innermost, then context ranks, replicas, and pipeline devices outermost.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from weft.describe.model import ModelConfig
from weft.doors.emit.base import Decided, Emitted, Loss, header, unexpressed
from weft.doors.keys import MEGATRON_LM
from weft.doors.replicas import group_counts
from weft.planning.planned_job import PlannedJob

NAME = "megatron"
STACK = "Megatron-LM"
FAMILIES = ("gpt", "llama")
_PROGRAM = "pretrain_gpt.py"
# The line with which the shell ends if its environment lacks a value.
_UNCHOSEN = "nobody chose it"
# The values that its scaling of rotary positions takes as given.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# One option per entry, with its values, in typed form.
Options = list[tuple[str, ...]]


def emit(planned: PlannedJob) -> Emitted:
    """Return the command line of the plan, whose model is of one of the `FAMILIES`."""
    decided = Decided(planned)
    order, order_losses = _order(decided)
    options = [
        *_degrees(decided),
        *order,
        *_batch(decided),
        *_states(decided),
        *_memory(decided),
        *_model(decided),
        *_training(decided),
    ]
    losses = (*decided.inequalities(STACK), *order_losses, *_losses(decided))
    lines = [decided.torchrun(_PROGRAM)]
    lines += [" ".join((option[0], *map(_quoted, option[1:]))) for option in options]
    lines.append(f"${{DATA_ARGUMENTS:?{_UNCHOSEN}; --mock-data for synthetic data}}")
    command = " \\\n  ".join(lines)
    launch = f"bash {NAME}.sh" + (", on every node with its NODE_RANK" if decided.nodes > 1 else "")
    head = f"#!/usr/bin/env bash\n{header(decided, launch, losses)}set -euo pipefail\n{_environment(decided)}"
    text = f"{head}\n{command}\n"
    return Emitted(file=f"{NAME}.sh", text=text, launch=launch, losses=losses)


def _quoted(value: str) -> str:
    return value if value.startswith('"${') else shlex.quote(value)


def _asked(variable: str) -> str:
    """Return a value that the shell takes from its environment; without it, the script ends with a line."""
    return f'"${{{variable}:?{_UNCHOSEN}}}"'


def _environment(decided: Decided) -> str:
    """Return the environment: tensor and context ranks need one hardware queue, Megatron FSDP several."""
    layout = decided.layout
    if layout.width == 1 or layout.sharding in _STRATEGIES:
        return ""
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"


def _counts(values: Mapping[str, Any]) -> Options:
    return [(key, str(value)) for key, value in MEGATRON_LM.values(values).items()]


def _degrees(decided: Decided) -> Options:
    options = _counts(decided.decisions)
    if decided.layout.tp > 1:
        options.append(("--sequence-parallel",))
    return options


def _order(decided: Decided) -> tuple[Options, list[Loss]]:
    """Return the options of stages and the order of micro-batches, and the losses."""
    layout, blocks = decided.layout, decided.blocks
    options: Options = []
    losses: list[Loss] = []
    if layout.pp == 1:
        return options, losses
    if len(set(blocks)) > 1:
        options.append(("--pipeline-model-parallel-layout", pipeline_text(decided)))
    elif layout.loops > 1:
        options.append(("--num-layers-per-virtual-pipeline-stage", str(blocks[0])))
    name = layout.schedule
    # Without loops it always waits for messages, in loops on two devices never.
    if layout.loops > 1 and layout.pp > 2 and "messages" in layout.blocking:
        options.append(("--no-overlap-p2p-communication",))
    if layout.loops == 1:
        if name != "1f1b":
            losses.append(Loss(f"schedule {name}, which {STACK} does not have", "1f1b"))
        return options, losses
    group, losses = _group(decided)
    if group != layout.pp:
        options.append(("--microbatch-group-size-per-virtual-pipeline-stage", str(group)))
    return options, losses


def _group(decided: Decided) -> tuple[int, list[Loss]]:
    """Return the number of micro-batches that a stage runs before the next one does, and the losses.
    Megatron-LM's groups have from pp to all micro-batches, and a rest is no smaller than pp."""
    devices, count, name = decided.layout.pp, decided.micro_batches, decided.layout.schedule
    rounds = int(decided.layout.options.get("depth", max(1, count // devices)))
    own = int(decided.layout.options.get("group_size", devices))
    wanted = {"breadth-first": count, "hybrid": count // rounds}.get(name, own)
    allowed = [group for group in range(devices, count + 1) if not 0 < count % group < devices]
    losses = []
    if name not in ("breadth-first", "depth-first", "hybrid"):
        losses.append(Loss(f"schedule {name}, which {STACK} does not have", "interleaved 1f1b (depth-first)"))
    if not allowed:
        what = f"{count} micro-batches on {devices} devices in loops; {STACK} needs as many as devices"
        return devices, [*losses, Loss(what, f"{devices} micro-batches")]
    group = min(allowed, key=lambda size: (abs(size - wanted), size))
    if name in ("breadth-first", "hybrid"):
        what = f"schedule {name}; {STACK} starts backwards before all forwards of a round are done"
        losses.append(Loss(what, f"interleaved 1f1b that runs {group} micro-batches through each stage"))
    elif group != wanted:
        what = f"{count} micro-batches in loops on {devices} devices, of which they are no multiple"
        losses.append(Loss(what, f"{group} micro-batches through each stage"))
    return group, losses


def pipeline_text(decided: Decided) -> str:
    """Return stages in the words of --pipeline-model-parallel-layout: E embedding, t blocks, L head."""
    layers = decided.job.problem.job.graph.layers
    stages = []
    for stage, count in zip(decided.plan.stages, decided.blocks, strict=True):
        kinds = {layers[index].kind for index in stage.layers}
        text = "E" if "embedding" in kinds else ""
        text += f"t*{count}" if count else ""
        stages.append(text + ("L" if "head" in kinds else ""))
    return "|".join(stages)


def _batch(decided: Decided) -> Options:
    layout, size = decided.layout, decided.plan.micro_batch_size
    least = layout.pp if layout.loops > 1 else 1
    batch = max(decided.micro_batches, least) * layout.dp * size
    return _counts({"micro_batch_size": size, "global_batch": batch})


_STRATEGIES = {"zero-2": "optim_grads", "zero-3": "optim_grads_params"}


def _states(decided: Decided) -> Options:
    """Return the options for sharded states, and for the overlap of reductions with backward passes."""
    layout = decided.layout
    options: Options = []
    overlapped = "reductions" not in layout.blocking
    # Ranks of the same stage and tensor rank have the same weights.
    if layout.ranks > layout.pp * layout.tp and overlapped:
        options.append(("--overlap-grad-reduce",))
    if layout.sharding == "zero-0":
        return options
    options.append(("--use-distributed-optimizer",))
    if overlapped and "gathers" not in layout.blocking:
        # It needs overlapped reductions.
        options.append(("--overlap-param-gather",))
    if layout.sharding in _STRATEGIES:
        options += [
            ("--use-megatron-fsdp",),
            ("--data-parallel-sharding-strategy", _STRATEGIES[layout.sharding]),
            ("--ckpt-format", "fsdp_dtensor"),
        ]
    return options + _counts(group_counts(layout))


def _memory(decided: Decided) -> Options:
    recompute = decided.layout.recompute
    if recompute == "none":
        return []
    if recompute == "selective":
        return [("--recompute-granularity", "selective")]
    return [
        ("--recompute-granularity", "full"),
        ("--recompute-method", "uniform"),
        ("--recompute-num-layers", "1"),
    ]


def _model(decided: Decided) -> Options:
    model = decided.model
    options: Options = [
        ("--num-layers", str(model.layers)),
        ("--hidden-size", str(model.hidden)),
        ("--ffn-hidden-size", str(model.feed_forward)),
        ("--num-attention-heads", str(model.heads)),
        (MEGATRON_LM.key("sequence"), str(decided.plan.sequence)),
        ("--max-position-embeddings", str(max(model.sequence, decided.plan.sequence))),
        ("--tokenizer-type", "NullTokenizer"),
        ("--vocab-size", str(model.vocabulary)),
        ("--attention-dropout", "0"),
        ("--hidden-dropout", "0"),
    ]
    if model.key_value_heads != model.heads:
        options += [("--group-query-attention",), ("--num-query-groups", str(model.key_value_heads))]
    if model.family == "llama":
        options += [
            ("--swiglu",),
            ("--normalization", "RMSNorm"),
            ("--position-embedding-type", "rope"),
            ("--disable-bias-linear",),
        ]
        if model.rotary_base is not None:
            options.append(("--rotary-base", f"{model.rotary_base:.0f}"))
        options += _scaled_positions(model)[0]
    if model.norm_epsilon is not None:
        options.append(("--norm-epsilon", f"{model.norm_epsilon:g}"))
    if not model.tied_embeddings:
        options.append(("--untie-embeddings-and-output-weights",))
    return options


def _scaled_positions(model: ModelConfig) -> tuple[Options, list[Loss]]:
    """Return the options of the scaled rotary positions of a model's `config.json`, and the losses."""
    record = json.loads(model.record or "{}")
    table = record.get("rope_scaling") or record.get("rope_parameters") or {}
    kind, factor = table.get("rope_type", table.get("type", "default")), table.get("factor") or 1
    if kind == "default":
        return [], []
    if kind == "linear" and factor == round(factor):
        return [("--rotary-seq-len-interpolation-factor", str(round(factor)))], []
    if kind == "llama3" and all(table.get(key) == value for key, value in _LLAMA3.items()):
        return [("--use-rope-scaling",), ("--rope-scaling-factor", f"{factor:g}")], []
    what = f"rotary positions scaled by {kind}: {json.dumps(table, sort_keys=True)}"
    return [], [Loss(f"{what}, which {STACK} has no options for", "positions as they are")]


def _training(decided: Decided) -> Options:
    run, optimizer = decided.run, decided.run.optimizer
    options: Options = []
    if decided.plan.precision in ("bf16", "fp16"):
        options.append((f"--{decided.plan.precision}",))
    options += _reductions(decided)
    options += [
        ("--train-iters", str(decided.chosen("train", "steps", _asked("TRAIN_ITERATIONS")))),
        ("--seed", str(run.train.seed or 1234)),
        ("--optimizer", "sgd" if optimizer.name == "sgd" else "adam"),
        ("--lr", str(decided.chosen("optimizer", "learning_rate", _asked("LEARNING_RATE")))),
        ("--clip-grad", str(decided.chosen("optimizer", "clip_norm", _asked("CLIP_NORM")))),
    ]
    # Where nobody chose them, the stack's own values stand.
    keys = {
        "--min-lr": "final_learning_rate",
        "--lr-decay-style": "schedule",
        "--lr-decay-iters": "decay_steps",
        "--lr-warmup-iters": "warm_up_steps",
        "--weight-decay": "weight_decay",
    }
    options += [
        (option, str(getattr(optimizer, key))) for option, key in keys.items() if run.chose("optimizer", key)
    ]
    if optimizer.name != "sgd" and optimizer.betas is not None:
        first, second = optimizer.betas
        options += [("--adam-beta1", f"{first:g}"), ("--adam-beta2", f"{second:g}")]
    return options


def _reductions(decided: Decided) -> Options:
    """Return the options of reductions, which are in fp32 by default with bf16, and not with fp16."""
    precision, reduced = decided.plan.precision, decided.plan.reduce_precision
    if precision == "bf16" and reduced == "bf16":
        return [("--grad-reduce-in-bf16",)]
    return [("--accumulate-allreduce-grads-in-fp32",)] if precision == "fp16" and reduced != "fp16" else []


def _losses(decided: Decided) -> Sequence[Loss]:
    layout, losses = decided.layout, decided.optimizer_losses()
    losses += unexpressed(layout, STACK, MEGATRON_LM.expressed())
    if layout.recompute == "selective":
        what = f"selective recomputation of all but products: {STACK} runs only the attention's core again"
        losses.append(Loss(what, "--recompute-granularity selective, which keeps more"))
    reduced = decided.plan.reduce_precision
    if reduced != "fp32" and reduced == decided.plan.precision:
        what = f"gradients reduced in {reduced} and accumulated in fp32"
        losses.append(Loss(f"{what}; {STACK} has one precision for both", f"both in {reduced}"))
    else:
        losses += decided.reduction_losses(STACK)
    if decided.plan.precision == "fp64":
        losses.append(Loss(f"precision fp64, which {STACK} does not train in", "fp32"))
    return losses + _scaled_positions(decided.model)[1]
