"""Parts that torchtitan's TOML and its configuration in Python share: equal keys, and losses.

Weights sharded, but not resharded after forward passes, are gathered once per step. This is nearest to zero-1
and zero-2.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.doors.emit.base import Decided, Loss, require_family, unexpressed
from weft.doors.keys import TORCHTITAN
from weft.doors.replicas import replica_counts
from weft.planning.planned import PlannedJob

STACK = "torchtitan"
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
# A norm that no gradient has.
_UNBOUNDED = 1e9
# A table's keys.
Table = dict[str, int | float | str | bool]


def decide(planned: PlannedJob) -> tuple[Decided, Table, tuple[Loss, ...]]:
    """Return the decisions, the keys of the schedule, and all losses.

    Raises:
        InputError: when the model is no Llama.
    """
    decided = Decided(planned)
    require_family(decided, STACK, ("llama",))
    order, order_losses = schedule(decided)
    return decided, order, (*decided.inequalities(STACK), *order_losses, *losses(decided))


def flavor(decided: Decided) -> str:
    """torchtitan's name of the model's sizes, or the model's own, which the user registers."""
    return FLAVORS.get(decided.model.name, decided.model.name)


def training(decided: Decided) -> Table:
    """Without a pipeline the local batch is a micro-batch, with one it is all of a replica's."""
    layout, run = decided.layout, decided.run
    local_batch = layout.micro_batch_size * (decided.micro_batches if layout.pp > 1 else 1)
    values: Table = {
        **TORCHTITAN.values(decided.batch | {"local_batch": local_batch}, "training."),
        "steps": run.train.steps,
        "mixed_precision_param": DTYPES.get(decided.plan.precision, "float32"),
    }
    # torchtitan clips to 1 where nothing is said, and has no word for never.
    values["max_norm"] = _UNBOUNDED if run.optimizer.clip_norm is None else run.optimizer.clip_norm
    return values


def degrees(decided: Decided) -> Table:
    """Degrees of all axes, and whether weights are given up after each forward pass."""
    layout = decided.layout
    values: Table = TORCHTITAN.values(decided.decisions | replica_counts(layout), "parallelism.")
    if layout.sharding != "zero-0":
        values["fsdp_reshard_after_forward"] = "always" if layout.sharding == "zero-3" else "never"
    return values


def schedule(decided: Decided) -> tuple[Table, list[Loss]]:
    """Return the order of micro-batches, and what is lost of it; nothing without a pipeline."""
    layout = decided.layout
    if layout.pp == 1:
        return {}, []
    looped = "Interleaved1F1B" if layout.loops > 1 else "1F1B"
    name = SCHEDULES.get(layout.schedule) or _NEAREST.get(layout.schedule, looped)
    losses = []
    if layout.schedule not in SCHEDULES:
        losses.append(Loss(f"schedule {layout.schedule}, which {STACK} does not have", name))
    size = TORCHTITAN.values({"micro_batch_size": layout.micro_batch_size}, "parallelism.")
    return {"pipeline_parallel_schedule": name} | size, losses


def parts(decided: Decided, modules: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the modules of every stage, which need not have equally many layers; none without a pipeline.

    `modules` are those of the embedding and the head, whose names are not the same in all versions.
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
    """Return the losses of both, without the order of micro-batches."""
    layout, found = decided.layout, decided.optimizer_losses()
    found += unexpressed(layout, STACK, TORCHTITAN.expressed())
    if layout.sharding in ("zero-1", "zero-2"):
        what = f"{layout.sharding}: {STACK} shares out weights, too, between steps"
        found.append(Loss(what, 'fsdp_reshard_after_forward = "never", which gathers them once per step'))
    if layout.recompute == "selective":
        what = f"selective recomputation of all but products: {STACK} also runs every second product again"
        found.append(Loss(what, "activation_checkpoint selective"))
    if decided.plan.precision not in DTYPES:
        found.append(Loss(f"precision {decided.plan.precision}, which {STACK} does not train in", "float32"))
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
