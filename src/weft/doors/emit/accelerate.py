"""Accelerate: the YAML of `accelerate launch --config_file`, with the plugin that the plan needs.

Replicas alone need no plugin, or DeepSpeed's for zero-1. Sharded gradients and weights need FSDP2. Pipelines
need Megatron-LM's, and so do tensor ranks with unsharded replicas. Micro-batches are no key of the file. They
stand in the launch line with the names of `transformers.TrainingArguments`.
"""

from __future__ import annotations

from typing import Any

import yaml

from weft.describe.plan import Recompute
from weft.doors.emit.base import Decided, Emitted, Loss, header, require_family, unexpressed
from weft.doors.keys import ACCELERATE, IN_DEEPSPEED, IN_MEGATRON, IN_SIZES
from weft.doors.replicas import group_counts, replica_counts
from weft.planning.planned_job import PlannedJob

# Arguments of transformers' Trainer, with the keys of the optimizer.
_ARGUMENTS = {
    "learning_rate": "learning_rate",
    "warmup_steps": "warm_up_steps",
    "weight_decay": "weight_decay",
    "max_grad_norm": "clip_norm",
}
NAME = "accelerate"
STACK = "Accelerate"
_BLOCKS = {"gpt": "GPT2Block", "llama": "LlamaDecoderLayer", "bert": "BertLayer", "vit": "ViTLayer"}


def emit(planned: PlannedJob) -> Emitted:
    """Return the configuration of the plan."""
    decided = Decided(planned)
    plugin, losses = _plugin(decided)
    losses = [*decided.inequalities(STACK), *losses, *_losses(decided)]
    precision = decided.plan.precision
    record: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        **plugin,
        "mixed_precision": precision if precision in ("bf16", "fp16") else "no",
        "num_machines": decided.nodes,
        **ACCELERATE.values({"devices": decided.layout.ranks}),
        "machine_rank": 0,
        "main_process_port": 29500,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": decided.on_processors,
    }
    file = f"{NAME}.yaml"
    launch = _launch(decided, file)
    text = header(decided, launch, losses) + yaml.safe_dump(record, sort_keys=False)
    return Emitted(file=file, text=text, launch=launch, losses=tuple(losses))


def _launch(decided: Decided, file: str) -> str:
    where = ' --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR"' if decided.nodes > 1 else ""
    batch = (
        f"--per_device_train_batch_size {decided.plan.micro_batch_size} "
        f"--gradient_accumulation_steps {decided.micro_batches}"
    )
    # Several processes on processors join each other only where the environment declares that there is no
    # device.
    told = "ACCELERATE_USE_CPU=true " if decided.on_processors and decided.layout.ranks > 1 else ""
    return f"{told}accelerate launch --config_file {file}{where} train.py {batch}{_chosen(decided)}"


def _chosen(decided: Decided) -> str:
    """Return the arguments of the program for everything that somebody chose and the YAML has no key for."""
    run, optimizer = decided.run, decided.run.optimizer
    chosen = {"max_steps": decided.chosen("train", "steps", None)}
    chosen |= {name: decided.chosen("optimizer", key, None) for name, key in _ARGUMENTS.items()}
    if run.chose("optimizer", "schedule"):
        constant = optimizer.schedule == "constant"
        chosen["lr_scheduler_type"] = "constant_with_warmup" if constant else optimizer.schedule
    if optimizer.betas is not None:
        chosen["adam_beta1"], chosen["adam_beta2"] = optimizer.betas
    return "".join(f" --{name} {value}" for name, value in chosen.items() if value is not None)


def _plugin(decided: Decided) -> tuple[dict[str, Any], list[Loss]]:
    layout = decided.layout
    shares_weights = layout.sharding in ("zero-2", "zero-3")
    if layout.pp > 1 or (layout.width > 1 and not shares_weights):
        return _megatron(decided)
    if layout.sharding == "zero-1":
        return _deepspeed(decided)
    if shares_weights:
        return _fsdp(decided)
    losses = unexpressed(layout, STACK, ACCELERATE.in_words)
    return {"distributed_type": "MULTI_GPU" if layout.ranks > 1 else "NO"}, losses


def _megatron(decided: Decided) -> tuple[dict[str, Any], list[Loss]]:
    require_family(decided.model, f"{STACK}'s Megatron-LM plugin", ("gpt", "llama", "bert"))
    layout, losses = decided.layout, []
    values: dict[str, Any] = {
        # Without degrees of 1 in the file, the plugin of Accelerate 1.13 and later takes two context ranks.
        **ACCELERATE.values(decided.decisions | decided.batch, IN_MEGATRON),
        "sequence_parallelism": layout.tp > 1,
        "recompute_activations": layout.recompute == "selective",
        "use_distributed_optimizer": layout.sharding != "zero-0",
    }
    if decided.run.optimizer.clip_norm is not None:
        values["gradient_clipping"] = decided.run.optimizer.clip_norm
    if layout.sharding in ("zero-2", "zero-3"):
        what = f"{layout.sharding} with a pipeline, which the Megatron-LM plugin does not have"
        losses.append(Loss(what, "use_distributed_optimizer (zero-1)"))
    # Its pipelines wait for messages.
    waits = {"blocking"} if layout.pp > 1 and layout.blocking == ("messages",) else set()
    losses += unexpressed(layout, "the Megatron-LM plugin", ACCELERATE.expressed(IN_MEGATRON) | waits)
    if layout.recompute == "full":
        values |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    else:
        losses.append(_recomputed(layout.recompute))
    if layout.loops > 1:
        blocks = max(1, decided.model.layers // (layout.pp * layout.loops))
        what = f"{layout.loops} loops, {layout.schedule}; the YAML has no key for stages per device"
        near = f"MegatronLMPlugin(num_layers_per_virtual_pipeline_stage={blocks}) in the program"
        losses.append(Loss(what, near))
    elif layout.schedule != "1f1b":
        losses.append(Loss(f"schedule {layout.schedule}, which the plugin does not have", "1f1b"))
    if len(set(decided.blocks)) > 1:
        what = f"stages of {', '.join(map(str, decided.blocks))} blocks"
        losses.append(Loss(what, "as many blocks in each, which their number must allow"))
    keys = {f"megatron_lm_{key}": value for key, value in values.items()}
    return {"distributed_type": "MEGATRON_LM", "megatron_lm_config": keys}, losses


def _recomputed(recompute: Recompute) -> Loss:
    """Return the loss of recomputation: the plugin of Accelerate 1.13 and later recomputes all by default."""
    granularity = "'selective'" if recompute == "selective" else "None"
    words = f"'recompute_granularity': {granularity}, 'recompute_method': None, 'recompute_num_layers': None"
    what = f"recompute {recompute}, where the plugin's default is full and no key of the YAML takes it back"
    return Loss(what, f"MegatronLMPlugin(other_megatron_args={{{words}}}) in the program")


def _deepspeed(decided: Decided) -> tuple[dict[str, Any], list[Loss]]:
    values: dict[str, Any] = {
        "zero_stage": 1,
        **ACCELERATE.values(decided.batch, IN_DEEPSPEED),
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
    }
    if decided.run.optimizer.clip_norm is not None:
        values["gradient_clipping"] = decided.run.optimizer.clip_norm
    losses = unexpressed(decided.layout, "the DeepSpeed plugin", ACCELERATE.expressed(IN_DEEPSPEED))
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": values}, losses


def _fsdp(decided: Decided) -> tuple[dict[str, Any], list[Loss]]:
    layout = decided.layout
    losses = unexpressed(layout, f"{STACK}'s FSDP2", ACCELERATE.expressed(IN_SIZES))
    values: dict[str, Any] = {
        "version": 2,
        "reshard_after_forward": layout.sharding == "zero-3",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": layout.recompute != "none",
        "offload_params": False,
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    block = _BLOCKS.get(decided.model.family)
    if block is None:
        values["auto_wrap_policy"] = "SIZE_BASED_WRAP"
        values["min_num_params"] = 10**6
    else:
        values["transformer_layer_cls_to_wrap"] = block
    if layout.sharding == "zero-2":
        what = f"zero-2: {STACK}'s FSDP2 shares out weights, too, between steps"
        losses.append(Loss(what, "fsdp_reshard_after_forward: false, which gathers them once per step"))
    sizes = ACCELERATE.values(decided.decisions | replica_counts(layout), IN_SIZES)
    plugin: dict[str, Any] = {
        "distributed_type": "FSDP",
        "fsdp_config": {f"fsdp_{key}": value for key, value in values.items()},
    }
    if layout.width > 1 or group_counts(layout):
        plugin["parallelism_config"] = {f"parallelism_config_{key}": size for key, size in sizes.items()}
    return plugin, losses


def _losses(decided: Decided) -> list[Loss]:
    layout, losses = decided.layout, decided.reduction_losses(STACK)
    alone, optimizer = layout.pp == 1, decided.run.optimizer
    for key in ("final_learning_rate", "decay_steps"):
        if (value := getattr(optimizer, key)) is not None:
            losses.append(
                Loss(f"{key} {value:g}, which the Trainer is not told", "a decay to 0 in the last step")
            )
    if alone and layout.recompute == "selective" and layout.sharding in ("zero-2", "zero-3"):
        losses.append(Loss("recompute selective", "fsdp_activation_checkpointing, which runs whole blocks"))
    if alone and layout.width == 1 and layout.recompute != "none" and layout.sharding in ("zero-0", "zero-1"):
        what = f"recompute {layout.recompute}, which the YAML has no key for here"
        losses.append(Loss(what, "model.gradient_checkpointing_enable()"))
    if len(set(decided.node_sizes)) > 1:
        what = f"nodes of {', '.join(map(str, decided.node_sizes))} devices; one file starts as many on each"
        losses.append(Loss(what, "torchrun on each node, with its own --nproc-per-node"))
    if decided.plan.precision == "fp64":
        losses.append(Loss(f"precision fp64, which {STACK} does not train in", "fp32 (mixed_precision: no)"))
    return losses
