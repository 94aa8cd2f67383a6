"""DeepSpeed: the JSON that `deepspeed.initialize` takes.

Where nobody chose a value, `auto` stands. The Trainer of transformers puts its own argument there; the engine
refuses it. A file has no comments, so the launch line and the losses stand outside it. The engine reads
`pipeline`, `tensor_parallel` and `sequence_parallel_size`. The model's code makes the `PipelineModule` with
equally many stages.
"""

from __future__ import annotations

import json
from typing import Any

from weft.doors.configuration import AUTO
from weft.doors.emit.base import Decided, Emitted, Loss, unexpressed
from weft.doors.keys import DEEPSPEED
from weft.planning.planned_job import PlannedJob

NAME = "deepspeed"
STACK = "DeepSpeed"


def emit(planned: PlannedJob) -> Emitted:
    """Return the configuration of the plan."""
    decided = Decided(planned)
    stage, state_losses = _zero_stage(decided)
    zero: dict[str, Any] = {"stage": stage}
    if stage > 0:
        overlapped = "reductions" not in decided.layout.blocking
        zero |= {"overlap_comm": overlapped, "contiguous_gradients": True}
    record = DEEPSPEED.values(decided.batch) | {"zero_optimization": zero}
    if decided.plan.precision in ("bf16", "fp16"):
        record[decided.plan.precision] = {"enabled": True}
    if decided.plan.reduce_precision is not None:
        record["communication_data_type"] = decided.plan.reduce_precision
    record["gradient_clipping"] = decided.chosen("optimizer", "clip_norm", AUTO)
    record |= _degrees(decided) | {"optimizer": _optimizer(decided)} | _scheduler(decided)
    file = f"{NAME}.json"
    return Emitted(
        file=file,
        text=json.dumps(record, indent=2) + "\n",
        launch=_launch(decided, file),
        losses=(*decided.inequalities(STACK), *state_losses, *_losses(decided)),
    )


def _degrees(decided: Decided) -> dict[str, Any]:
    """Return degrees of several ranks, in their tables; a pipeline's table has the recomputation too."""
    record: dict[str, Any] = {}
    for key, degree in DEEPSPEED.values(decided.decisions).items():
        table, _, name = key.rpartition(".")
        if degree > 1:
            record |= {table: {name: degree}} if table else {name: degree}
    if "pipeline" in record:
        record["pipeline"]["activation_checkpoint_interval"] = int(decided.layout.recompute == "full")
    return record


def _launch(decided: Decided, file: str) -> str:
    sizes = f"--num_gpus {decided.devices_per_node}"
    if decided.nodes > 1:
        # The slots of the host file hold the ranks of each node, where nodes differ.
        alike = f" {sizes}" if len(set(decided.node_sizes)) == 1 else ""
        sizes = f"--hostfile hostfile --num_nodes {decided.nodes}{alike}"
    return f"deepspeed {sizes} train.py --deepspeed --deepspeed_config {file}"


def _zero_stage(decided: Decided) -> tuple[int, list[Loss]]:
    """Return the nearest stage that goes with the plan's other axes, and the losses."""
    layout = decided.layout
    stage, losses = int(layout.sharding[-1]), []
    if layout.pp > 1 and stage > 1:
        what = f"{layout.sharding} with a pipeline, which {STACK} refuses"
        losses.append(Loss(what, "zero_optimization stage 1"))
        stage = 1
    if layout.tp > 1 and stage > 2:
        losses.append(Loss(f"{layout.sharding} with tensor ranks", "zero_optimization stage 2"))
        stage = 2
    # The engine of a pipeline waits for all communication; stages that shard may wait for collectives.
    waits = {"blocking"} if layout.pp > 1 or (stage > 0 and "messages" not in layout.blocking) else set()
    return stage, losses + unexpressed(layout, STACK, DEEPSPEED.expressed() | waits)


def _optimizer(decided: Decided) -> dict[str, Any]:
    names = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
    keys = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    keys |= {"momentum": "momentum"} if decided.optimizer == "sgd" else {"betas": "betas"}
    values = {name: decided.chosen("optimizer", key, AUTO) for name, key in keys.items()}
    return {"type": names[decided.optimizer], "params": values}


def _scheduler(decided: Decided) -> dict[str, Any]:
    """Return the section of warm-up and decay, if somebody chose one of them; else the program decides."""
    optimizer = decided.run.optimizer
    if not any(decided.run.chose("optimizer", key) for key in ("schedule", "warm_up_steps")):
        return {}
    values: dict[str, Any] = {"warmup_num_steps": optimizer.warm_up_steps, "warmup_type": "linear"}
    if optimizer.schedule != "constant":
        values["total_num_steps"] = optimizer.decay_steps or decided.chosen("train", "steps", AUTO)
    if optimizer.schedule == "cosine":
        values |= {"warmup_min_ratio": 0.0, "cos_min_ratio": decided.final_share}
    else:
        rate = decided.chosen("optimizer", "learning_rate", AUTO)
        values |= {"warmup_min_lr": 0.0, "warmup_max_lr": rate}
    names = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
    return {"scheduler": {"type": names[optimizer.schedule], "params": values}}


def _losses(decided: Decided) -> list[Loss]:
    layout, blocks, losses = decided.layout, decided.blocks, decided.optimizer_losses()
    optimizer = decided.run.optimizer
    if optimizer.schedule == "linear" and optimizer.final_learning_rate:
        what = f"final_learning_rate {optimizer.final_learning_rate:g} of a linear decay"
        losses.append(Loss(f"{what}; {STACK}'s ends at 0", "WarmupDecayLR"))
    if layout.pp > 1 and layout.loops > 1:
        what = f"{layout.loops} stages per device ({layout.schedule})"
        losses.append(Loss(f"{what}; {STACK}'s pipeline has one", "1f1b with one stage per device"))
    elif layout.pp > 1 and layout.schedule != "1f1b":
        losses.append(Loss(f"schedule {layout.schedule}, which {STACK} does not have", "1f1b"))
    if layout.pp > 1:
        what = f"stages of {', '.join(map(str, blocks))} blocks, which the JSON does not name"
        near = "PipelineModule(partition_method='parameters'), which balances parameters"
        losses.append(Loss(what, near))
    if layout.pp > 1 and layout.tp > 1:
        what = f"a pipeline of tensor groups, of which {STACK} alone does only the pipeline"
        losses.append(Loss(what, "Megatron-DeepSpeed, whose layers are divided by its own mpu"))
    if layout.cp > 1:
        what = "context ranks that gather keys and values"
        losses.append(Loss(f"{what}; {STACK} exchanges heads", "Ulysses with sequence_parallel_size"))
    if layout.recompute == "selective" or (layout.recompute == "full" and layout.pp == 1):
        what = f"recompute {layout.recompute}, which the JSON configures and does not switch on"
        losses.append(Loss(what, "model.gradient_checkpointing_enable(), which recomputes whole blocks"))
    if decided.plan.precision == "fp64":
        losses.append(Loss(f"precision fp64, which {STACK} does not train in", "fp32"))
    return losses
