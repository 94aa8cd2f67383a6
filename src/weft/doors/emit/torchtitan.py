"""torchtitan: a job's TOML, as `run_train.sh` and `torchrun -m torchtitan.train` read it.

Keys are those of `torchtitan/config/job_config.py`. Weights that are sharded without being resharded after
forward passes are gathered once per step: the nearest to zero-1 and zero-2.
"""

from __future__ import annotations

from weft.describe.toml_text import table_text, value_text
from weft.doors.emit.base import Decided, Emitted, Loss, header, require_family
from weft.planning.planned import PlannedJob

NAME = "torchtitan"
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "depth-first": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
}
_NEAREST = {"hybrid": "Interleaved1F1B"}
# Presets that are sizes of torchtitan's own.
FLAVORS = {"llama-3-8b": "8B", "llama-3-70b": "70B"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def emit(planned: PlannedJob) -> Emitted:
    """The TOML of the plan.

    Raises:
        InputError: when the model is no Llama.
    """
    decided = Decided(planned)
    require_family(decided, NAME, ("llama",))
    schedule, order_losses = _schedule(decided)
    losses = (*decided.inequalities(NAME), *order_losses, *_losses(decided))
    file = f"{NAME}.toml"
    launch = decided.torchrun(f"-m torchtitan.train --job.config_file {file}")
    tables = [
        table_text(
            "[model]", {"name": "llama3", "flavor": FLAVORS.get(decided.model.name, decided.model.name)}
        ),
        _training(decided),
        _optimizer(decided),
        table_text("[parallelism]", _degrees(decided) | schedule) + _parts(decided),
        table_text("[activation_checkpoint]", _recompute(decided)),
    ]
    text = header(decided, launch, losses) + "\n" + "\n".join(tables)
    return Emitted(file=file, text=text, launch=launch, losses=losses)


def _training(decided: Decided) -> str:
    """Without a pipeline the local batch is a micro-batch, with one it is all of a replica's."""
    layout, run = decided.layout, decided.run
    local = layout.micro_batch_size * (decided.micro_batches if layout.pipeline_parallel > 1 else 1)
    values: dict[str, int | float | str] = {
        "local_batch_size": local,
        "global_batch_size": decided.global_batch,
        "seq_len": decided.plan.sequence,
        "steps": run.train.steps,
        "mixed_precision_param": DTYPES.get(decided.plan.precision, "float32"),
    }
    if run.optimizer.clip_norm is not None:
        values["max_norm"] = run.optimizer.clip_norm
    return table_text("[training]", values)


def _optimizer(decided: Decided) -> str:
    optimizer = decided.run.optimizer
    name = "Adam" if optimizer.name == "adam" else "AdamW"
    table = table_text("[optimizer]", {"name": name, "lr": optimizer.learning_rate})
    return table + "\n" + table_text("[lr_scheduler]", {"warmup_steps": optimizer.warm_up_steps})


def _degrees(decided: Decided) -> dict[str, int | float | str | bool]:
    layout = decided.layout
    shard = 1 if layout.sharding == "zero-0" else layout.island or layout.data_parallel
    values: dict[str, int | float | str | bool] = {
        "data_parallel_replicate_degree": layout.data_parallel // shard,
        "data_parallel_shard_degree": shard,
        "tensor_parallel_degree": layout.tensor_parallel,
        "context_parallel_degree": layout.context_parallel,
        "pipeline_parallel_degree": layout.pipeline_parallel,
    }
    if layout.sharding != "zero-0":
        values["fsdp_reshard_after_forward"] = "always" if layout.sharding == "zero-3" else "never"
    return values


def _schedule(decided: Decided) -> tuple[dict[str, int | float | str | bool], list[Loss]]:
    layout = decided.layout
    if layout.pipeline_parallel == 1:
        return {}, []
    looped = "Interleaved1F1B" if layout.loops > 1 else "1F1B"
    name = SCHEDULES.get(layout.schedule) or _NEAREST.get(layout.schedule, looped)
    losses = []
    if layout.schedule not in SCHEDULES:
        losses.append(Loss(f"schedule {layout.schedule}, which {NAME} does not have", name))
    values: dict[str, int | float | str | bool] = {
        "pipeline_parallel_schedule": name,
        "pipeline_parallel_microbatch_size": layout.micro_batch_size,
    }
    return values, losses


def _parts(decided: Decided) -> str:
    """The layers of every stage, which need not be equally many."""
    if decided.layout.pipeline_parallel == 1:
        return ""
    layers = decided.job.problem.job.graph.layers
    parts = [[_module(layers[index].name) for index in stage.layers] for stage in decided.plan.stages]
    lines = ",\n".join(f"  {value_text([name for names in part for name in names])}" for part in parts)
    return f"module_fqns_per_model_part = [\n{lines},\n]\n"


def _module(layer: str) -> list[str]:
    """torchtitan's modules of one of weft's layers."""
    names = {"embedding": ["tok_embeddings"], "head": ["norm", "output"]}
    return names.get(layer) or [f"layers.{layer.removeprefix('block.')}"]


def _recompute(decided: Decided) -> dict[str, int | float | str | bool]:
    mode = decided.layout.recompute
    values: dict[str, int | float | str | bool] = {"mode": mode}
    return values | ({"selective_ac_option": "op"} if mode == "selective" else {})


def _losses(decided: Decided) -> list[Loss]:
    layout, losses = decided.layout, []
    if layout.sharding in ("zero-1", "zero-2"):
        what = f"{layout.sharding}: {NAME} shares out weights, too, between steps"
        losses.append(Loss(what, 'fsdp_reshard_after_forward = "never", which gathers them once per step'))
    if layout.recompute == "selective":
        what = f"selective recomputation of all but products: {NAME} also runs every second product again"
        losses.append(Loss(what, 'selective_ac_option = "op"'))
    if decided.plan.precision not in DTYPES:
        losses.append(Loss(f"precision {decided.plan.precision}, which {NAME} does not train in", "float32"))
    if decided.run.optimizer.name == "sgd":
        losses.append(Loss(f"optimizer sgd, which {NAME} does not have", "AdamW"))
    model = decided.model
    if model.tied_embeddings:
        losses.append(Loss(f"tied embeddings, which {NAME}'s llama3 does not have", "a matrix for each"))
    if model.name not in FLAVORS:
        sizes = (
            f"{model.layers} layers of {model.hidden}, {model.heads} heads, {model.key_value_heads} groups"
        )
        what = f"the model's sizes ({sizes}), which {NAME} takes from a flavor"
        losses.append(Loss(what, f"register a flavor {model.name!r} of llama3"))
    return losses
