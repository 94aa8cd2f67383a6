"""The common parts of torchtitan's TOML and its configuration in Python: keys of the same names, and losses.

Sharded weights without resharding after forward passes are gathered once per step. This is the nearest to
zero-1 and zero-2.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.doors.emit.base import Decided, Loss, unexpressed
from weft.doors.keys import TORCHTITAN
from weft.doors.replicas import replica_counts
from weft.planning.planned_job import PlannedJob

STACK = "torchtitan"
FAMILIES = ("llama",)
# Of one stage per device, and of several.
_SINGLE = {"gpipe": "GPipe", "breadth-first": "GPipe", "1f1b": "1F1B"}
_LOOPED = {"depth-first": "Interleaved1F1B", "breadth-first": "LoopedBFS", "zb-v": "ZBVZeroBubble"}
# Presets with sizes of torchtitan's own.
FLAVORS = {"llama-3-8b": "8B", "llama-3-70b": "70B", "llama-3-405b": "405B"}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# Stands for a value that nobody chose: a text, which is no number and no name of data.
UNCHOSEN = "nobody chose it"
# The keys of a table.
Table = dict[str, int | float | str | bool]


def decide(planned: PlannedJob) -> tuple[Decided, Table, tuple[Loss, ...]]:
    """Return the decisions, the keys of their schedule, and all losses. The model is of the `FAMILIES`."""
    decided = Decided(planned)
    order, order_losses = schedule(decided)
    return decided, order, (*decided.inequalities(STACK), *order_losses, *losses(decided))


def flavor(decided: Decided) -> str:
    """Return torchtitan's name of the model's sizes, or the model's own, which the user registers."""
    return FLAVORS.get(decided.model.name, decided.model.name)


def training(decided: Decided) -> Table:
    """Return the training keys. The local batch is a micro-batch, or with a pipeline all of a replica's
    batch."""
    layout = decided.layout
    local_batch = layout.micro_batch_size * (decided.micro_batches if layout.pp > 1 else 1)
    values: Table = {
        **TORCHTITAN.values(decided.batch | {"local_batch": local_batch}, "training."),
        "steps": decided.chosen("train", "steps", UNCHOSEN),
        "mixed_precision_param": DTYPES.get(decided.plan.precision, "float32"),
    }
    values["max_norm"] = decided.chosen("optimizer", "clip_norm", UNCHOSEN)
    return values


def learning_rate(decided: Decided) -> Table:
    """Return the keys of warm-up and decay that somebody chose."""
    optimizer, run = decided.run.optimizer, decided.run
    values: Table = {}
    if run.chose("optimizer", "warm_up_steps"):
        values["warmup_steps"] = optimizer.warm_up_steps
    if run.chose("optimizer", "schedule") and optimizer.schedule == "constant":
        values["decay_ratio"] = 0.0
    elif run.chose("optimizer", "schedule"):
        values |= {"decay_type": optimizer.schedule, "min_lr_factor": decided.final_share}
    return values


def degrees(decided: Decided) -> Table:
    """Return the degrees of all axes, and the resharding of weights after each forward pass."""
    layout = decided.layout
    values: Table = TORCHTITAN.values(decided.decisions | replica_counts(layout), "parallelism.")
    if layout.sharding != "zero-0":
        values["fsdp_reshard_after_forward"] = "always" if layout.sharding == "zero-3" else "never"
    return values


def schedule(decided: Decided) -> tuple[Table, list[Loss]]:
    """Return the order of micro-batches, and its losses; nothing without a pipeline."""
    layout = decided.layout
    if layout.pp == 1:
        return {}, []
    names, nearest = (_SINGLE, "1F1B") if layout.loops == 1 else (_LOOPED, "Interleaved1F1B")
    name = names.get(layout.schedule, nearest)
    losses = []
    if layout.schedule not in names:
        of = " of one stage per device" if layout.schedule in _LOOPED else ""
        losses.append(Loss(f"schedule {layout.schedule}{of}, which {STACK} does not have", name))
    size = TORCHTITAN.values({"micro_batch_size": layout.micro_batch_size}, "parallelism.")
    return {"pipeline_parallel_schedule": name} | size, losses


def parts(decided: Decided, modules: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the modules of every stage, which may have unequal numbers of layers; none without a pipeline.

    `modules` are those of the embedding and the head; versions differ in their names.
    """
    if decided.layout.pp == 1:
        return []
    layers = decided.job.problem.job.graph.layers

    def of(layer: str) -> list[str]:
        return modules.get(layer) or [f"layers.{layer.removeprefix('block.')}"]

    return [
        [name for index in stage.layers for name in of(layers[index].name)] for stage in decided.plan.stages
    ]


def losses(decided: Decided) -> list[Loss]:
    """Return the losses in both forms, without those of the order of micro-batches."""
    layout, found = decided.layout, decided.optimizer_losses()
    # It has a key for the precision of reductions, whose only word is float32.
    found += decided.reduction_losses(STACK)
    found += unexpressed(layout, STACK, TORCHTITAN.expressed())
    if layout.sharding in ("zero-1", "zero-2"):
        what = f"{layout.sharding}: {STACK} shares out weights, too, between steps"
        found.append(Loss(what, 'fsdp_reshard_after_forward = "never", which gathers them once per step'))
    if layout.recompute == "selective":
        what = f"selective recomputation of all but products: {STACK} also runs every second product again"
        found.append(Loss(what, "activation_checkpoint selective"))
    if decided.plan.precision not in DTYPES:
        found.append(Loss(f"precision {decided.plan.precision}, which {STACK} does not train in", "float32"))
    if decided.run.optimizer.decay_steps is not None:
        what = f"decay_steps {decided.run.optimizer.decay_steps}: {STACK} decays until the last step"
        found.append(Loss(what, "training.steps"))
    if decided.run.optimizer.name == "sgd":
        found.append(Loss(f"optimizer sgd, which {STACK} does not have", "AdamW"))
    model = decided.model
    if model.tied_embeddings:
        found.append(Loss(f"tied embeddings, which {STACK}'s llama3 does not have", "a matrix for each"))
    if model.name not in FLAVORS:
        sizes = (
            f"{model.layers} layers of {model.hidden}, {model.heads} heads, {model.key_value_heads} groups"
        )
        what = f"the model's sizes ({sizes}), which {STACK} takes from a flavor"
        found.append(Loss(what, f"register a flavor {model.name!r} of llama3"))
    return found
