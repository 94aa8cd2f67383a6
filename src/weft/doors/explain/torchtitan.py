"""torchtitan: a job's TOML, and a configuration in Python of version 0.3 and later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.describe.plan import Recompute, Sharding
from weft.doors.configuration import Configuration, counts, flat, truth, whole
from weft.doors.explain.reading import toml_mapping
from weft.doors.explain.torchtitan_python import configured, python_tables
from weft.doors.keys import TORCHTITAN
from weft.doors.replicas import replicas_of

NAME = "torchtitan"
_SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "depth-first",
    "loopedbfs": "breadth-first",
    "interleavedzerobubble": "zb-h1",
    "zbvzerobubble": "zb-v",
    "dualpipev": "zb-v",
}
SCHEDULE = "parallelism.pipeline_parallel_schedule"
# Schedules of several stages per device; by default torchtitan gives them two.
LOOPED = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
_FLAVORS = {"8B": "llama-3-8b", "70B": "llama-3-70b"}
_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}


def recognises(text: str, name: str) -> bool:
    """Return True for TOML with torchtitan's tables, or Python that builds its configuration."""
    if configured(text):
        return True
    record = toml_mapping(text)
    if record is None:
        return False
    tables = {key for key, value in record.items() if isinstance(value, Mapping)}
    return "training" in tables and bool(
        tables & {"parallelism", "activation_checkpoint", "lr_scheduler", "job"}
    )


def read(text: str, name: str) -> Configuration:
    """Return the keys, by table.

    Raises:
        InputError: when a degree or a batch size is no count, or Python has several configurations.
    """
    given = flat(python_tables(text, name) if configured(text) else toml_mapping(text) or {}, name)
    values, keys = counts(given, TORCHTITAN.counts, name)
    batch, batch_keys = _batch(given, values, name)
    sharding, replicas = _replicas(given, name)
    said = {
        "sharding": sharding,
        "loops": _loops(given, values.get("pp", 1)),
        "schedule": _schedule(given, values.get("pp", 1)),
        "recompute": _recompute(given),
    }
    configuration = Configuration(
        stack=NAME,
        given=given,
        keys=keys | batch_keys,
        precision=_PRECISIONS.get(str(given.get("training.mixed_precision_param", "bfloat16"))),
        reduce_precision=_PRECISIONS.get(str(given.get("training.mixed_precision_reduce"))),
        # By default torchtitan clips to a norm of 1.
        clips=given.get("training.max_norm", 1.0) != 0,
        model=_model(given),
        unpredicted=tuple(_unpredicted(given)),
    )
    return configuration.saying(said | values | batch | replicas)


def _batch(
    given: Mapping[str, Any], values: Mapping[str, int], file: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sizes of batches: with a pipeline the local batch is all of a replica's step."""
    local, keys = counts(given, TORCHTITAN.only("local_batch"), file)
    size, key = local.get("local_batch", 8), keys.get("local_batch", TORCHTITAN.key("local_batch"))
    if values.get("pp", 1) == 1:
        batch = {"micro_batch_size": size}
        if "global_batch" not in values:
            batch["micro_batches"] = 1
        return batch, {"micro_batch_size": key}
    micro, _ = counts(given, TORCHTITAN.only("micro_batch_size"), file)
    each = micro.get("micro_batch_size", 1)
    return (
        {"micro_batch_size": each, "micro_batches": max(1, size // each)},
        {"micro_batch_size": TORCHTITAN.key("micro_batch_size"), "micro_batches": key},
    )


def _replicas(given: Mapping[str, Any], file: str) -> tuple[Sharding, dict[str, Any]]:
    """Return the sharding, and the number of replicas where the file gives it."""
    degrees, _ = counts(given, TORCHTITAN.only("replicate", "shard"), file)
    # The remaining ranks shard unless another degree is given.
    if degrees.get("shard") == 1:
        return "zero-0", {"dp": degrees.get("replicate", 1)}
    resharded = given.get("parallelism.fsdp_reshard_after_forward", "default")
    pipeline = whole(given.get(TORCHTITAN.key("pp"), 1)) != 1
    kept = resharded == "never" or (resharded == "default" and pipeline)
    return "zero-2" if kept else "zero-3", replicas_of(degrees)


def schedule_name(given: Mapping[str, Any]) -> str:
    """Return the schedule in small letters, which torchtitan compares."""
    return str(given.get(SCHEDULE, "1F1B")).lower().removeprefix("schedule")


def _schedule(given: Mapping[str, Any], pipeline: int) -> str | None:
    return "1f1b" if pipeline == 1 else _SCHEDULES.get(schedule_name(given))


def _loops(given: Mapping[str, Any], pipeline: int) -> int:
    """Return the loops of the listed stages, or the schedule's default without a list."""
    if pipeline == 1:
        return 1
    parts = given.get("parallelism.module_fqns_per_model_part")
    points = given.get("parallelism.pipeline_parallel_split_points")
    if isinstance(parts, list) and parts:
        return max(1, len(parts) // pipeline)
    if isinstance(points, list) and points:
        return max(1, (len(points) + 1) // pipeline)
    return 2 if schedule_name(given) in LOOPED else 1


def _recompute(given: Mapping[str, Any]) -> Recompute:
    """Return the recomputation; torchtitan's own default is selective."""
    mode = given.get("activation_checkpoint.mode", "selective")
    return "full" if mode == "full" else "none" if mode == "none" else "selective"


def _model(given: Mapping[str, Any]) -> str | None:
    if not str(given.get("model.name", "")).startswith("llama3"):
        return None
    flavor = str(given.get("model.flavor", ""))
    return _FLAVORS.get(flavor, flavor) or None


def _unpredicted(given: Mapping[str, Any]) -> list[str]:
    found = []
    option = str(given.get("activation_checkpoint.selective_ac_option", "2"))
    if given.get("activation_checkpoint.mode", "selective") == "selective" and option != "op":
        found.append(
            f"activation_checkpoint.selective_ac_option {option}: one block in {option} is recomputed; "
            "predicted as all blocks without their products"
        )
    converters = given.get("model.converters")
    if converters:
        found.append(f"model.converters {converters}: predicted in the precision beside them")
    if truth(given.get("training.enable_cpu_offload")):
        found.append("training.enable_cpu_offload: predicted as held by the devices")
    if whole(given.get("parallelism.expert_parallel_degree", 1)) != 1:
        found.append("parallelism.expert_parallel_degree: experts are not predicted")
    return found
