"""torchtitan: a job's TOML, and a configuration in Python of version 0.3 and later.

A module of torchtitan has a function for each configuration, `Trainer.Config(training=TrainingConfig(...))`.
Its keywords are the tables of the TOML, with the same keys; the function may set some of them later. Only
literals are read; nothing is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from weft.describe.models import PRESETS
from weft.describe.plan import Recompute, Sharding
from weft.doors.configuration import Configuration, counts, flat, toml_mapping, truth, whole
from weft.doors.keys import READ_KEYS, TORCHTITAN
from weft.doors.optimizers import in_torch, other_optimizer
from weft.doors.replicas import replicas_of
from weft.doors.stack_memory import memory_of_fsdp2
from weft.doors.stage_splits import StageSplit
from weft.errors import InputError, Violation

NAME = "torchtitan"
_SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "depth-first",
    "loopedbfs": "breadth-first",
    "interleavedzerobubble": "depth-first",
    "zbvzerobubble": "zb-v",
    "dualpipev": "zb-v",
    # A table in a CSV gives the order of these.
    "pipelineschedulesingle": "1f1b",
    "pipelineschedulemulti": "depth-first",
    "_pipelinescheduleruntime": "depth-first",
}
# The nearest orders that weft has, and what they lack.
_NEAREST = {
    "interleavedzerobubble": "predicted as Interleaved1F1B, whose backward passes are whole",
    "dualpipev": "predicted as ZBVZeroBubble, which overlaps no two passes",
}
SCHEDULE = "parallelism.pipeline_parallel_schedule"
SCHEDULE_CSV = "parallelism.pipeline_parallel_schedule_csv"
_PARTS = "parallelism.module_fqns_per_model_part"
_POINTS = "parallelism.pipeline_parallel_split_points"
LAYERS_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_ENDS = (
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
)
# Versions of 2024 have the keys of `parallelism` in two other tables.
_OLD_KEY = re.compile(r"(training|experimental)\.(?=\w+_parallel_|enable_\w+_parallel$)")
RECOMPUTE = "activation_checkpoint.mode"
RESHARD = "parallelism.fsdp_reshard_after_forward"
PRECISION = "training.mixed_precision_param"
# The modules that are layers here; versions differ in the head's name, and the last norm goes with it.
_LAYER = re.compile(r"tok_embeddings|layers\.\d+|output|lm_head")
# Schedules of several stages per device; by default torchtitan gives them two.
LOOPED = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")
_FLAVORS = {"8B": "llama-3-8b", "70B": "llama-3-70b", "405B": "llama-3-405b"}
PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}


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
    record, unread = python_tables(text, name) if configured(text) else (toml_mapping(text) or {}, ())
    tables = flat(record, name)
    given = {_OLD_KEY.sub("parallelism.", key): value for key, value in tables.items()}
    values, keys = counts(given, TORCHTITAN.counts, name)
    batch, batch_keys = _batch(given, values, name)
    sharding, replicas = _replicas(given, name)
    said = {
        "sharding": sharding,
        "loops": _loops(given, values.get("pp", 1)),
        "schedule": "1f1b" if values.get("pp", 1) == 1 else _SCHEDULES.get(schedule_name(given)),
        "recompute": _recompute(given),
    }
    configuration = Configuration(
        stack=NAME,
        given=given,
        # By default the kernel is fused.
        optimizer=in_torch(
            given.get("optimizer.name"), foreach=given.get("optimizer.implementation") == "foreach"
        ),
        keys=keys | batch_keys,
        precision=PRECISIONS.get(str(given.get(PRECISION, "bfloat16"))),
        reduce_precision=PRECISIONS.get(str(given.get("training.mixed_precision_reduce"))),
        # By default torchtitan clips to a norm of 1.
        clips=given.get("training.max_norm", 1.0) != 0,
        launch="compiled" if is_compiled(given) else "eager",
        model=_model(given),
        unpredicted=(
            *_unpredicted(given),
            *(f"{key}: set by code, which weft does not run" for key in unread),
        ),
        incomparable=tuple(_incomparable(given)),
        memory=memory_of_fsdp2(sharding),
        split=_split(given),
    )
    return configuration.saying(said | values | batch | replicas)


def is_compiled(given: Mapping[str, Any]) -> bool:
    """Return True if a file compiles layers, in the words of any of torchtitan's versions."""
    of_layers = "model" in str(given.get("compile.components", "model"))
    return truth(given.get("training.compile")) or (truth(given.get("compile.enable")) and of_layers)


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
    resharded = given.get(RESHARD, "default")
    pipeline = whole(given.get(TORCHTITAN.key("pp"), 1)) != 1
    kept = resharded == "never" or (resharded == "default" and pipeline)
    return "zero-2" if kept else "zero-3", replicas_of(degrees)


def schedule_name(given: Mapping[str, Any]) -> str:
    """Return the schedule in small letters, which torchtitan compares."""
    return str(given.get(SCHEDULE, "1F1B")).lower().removeprefix("schedule")


def _split(given: Mapping[str, Any]) -> StageSplit | None:
    """Return the layers of the stages: of the listed modules, or equally many, with both ends among them.

    Each end counts as so many layers as its stage has less.
    """
    parts = given.get(_PARTS)
    if given.get(_POINTS):
        return _split_at(given)
    if isinstance(parts, list) and parts and all(isinstance(part, list) for part in parts):
        layers = (sum(bool(_LAYER.fullmatch(str(module))) for module in part) for part in parts)
        return StageSplit(layers=tuple(layers))
    first, last = _ends(given)
    return StageSplit(counts_embedding=first, counts_head=last)


def _split_at(given: Mapping[str, Any]) -> StageSplit | None:
    """Return the layers between the points of a file; None where the model or the order is not known."""
    points = given[_POINTS] if isinstance(given[_POINTS], list) else [given[_POINTS]]
    named = [re.fullmatch(r"layers\.(\d{1,6})", str(point)) for point in points]
    model = PRESETS.get(_model(given) or "")
    if model is None:
        return None
    # The embedding comes before the first layer, the head after the last.
    edges = [-1, *(int(found[1]) for found in named if found), model.layers + 1]
    layers = tuple(end - start for start, end in pairwise(edges))
    return StageSplit(layers=layers) if all(named) and min(layers) > 0 else None


def _loops(given: Mapping[str, Any], pipeline: int) -> int:
    """Return the loops of the listed stages, or the schedule's default without a list."""
    if pipeline == 1:
        return 1
    parts = given.get(_PARTS)
    points = given.get(_POINTS)
    if isinstance(parts, list) and parts:
        return max(1, len(parts) // pipeline)
    if isinstance(points, list) and points:
        return max(1, (len(points) + 1) // pipeline)
    if (stages := stages_by_layers(given)) is not None:
        return max(1, stages // pipeline)
    return 1 if _SCHEDULES.get(schedule_name(given), "1f1b") in ("gpipe", "1f1b") else 2


def stages_by_layers(given: Mapping[str, Any]) -> int | None:
    """Return the stages of a pipeline with so many layers in each; None where the file does not say both."""
    each, model = whole(given.get(LAYERS_PER_STAGE)), PRESETS.get(_model(given) or "")
    if not isinstance(each, int) or each < 1 or model is None:
        return None
    return -(-(model.layers + sum(_ends(given))) // each)


def _ends(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return the layers that the first and the last stage have less than others."""
    first, last = (whole(given.get(key, 1)) for key in _ENDS)
    return (first if isinstance(first, int) else 1), (last if isinstance(last, int) else 1)


def _recompute(given: Mapping[str, Any]) -> Recompute | None:
    """Return the recomputation; torchtitan's own default is selective, the program's own is not known."""
    mode = given.get(RECOMPUTE, "selective")
    return None if mode is None else "full" if mode == "full" else "none" if mode == "none" else "selective"


def _model(given: Mapping[str, Any]) -> str | None:
    if not str(given.get("model.name", "")).startswith("llama3"):
        return None
    flavor = str(given.get("model.flavor", ""))
    return _FLAVORS.get(flavor, flavor) or None


def _unpredicted(given: Mapping[str, Any]) -> list[str]:
    found = []
    pipelined = whole(given.get(TORCHTITAN.key("pp"), 1)) != 1
    if pipelined and (near := _NEAREST.get(schedule_name(given))) is not None:
        found.append(f"{SCHEDULE} {given[SCHEDULE]}: {near}")
    if pipelined and given.get(SCHEDULE_CSV):
        near = _SCHEDULES.get(schedule_name(given), "1f1b")
        found.append(f"{SCHEDULE_CSV}: weft does not read the CSV; predicted as {near}")
    if whole(given.get(LAYERS_PER_STAGE)) is not None and stages_by_layers(given) is None:
        found.append(f"{LAYERS_PER_STAGE}: predicted with the schedule's usual number of stages")
    if given.get(_POINTS) and _split_at(given) is None:
        found.append(f"{_POINTS}: predicted with balanced stages")
    if given.get(RECOMPUTE) == "memory_budget":
        found.append(f"{RECOMPUTE} memory_budget: predicted as selective, whatever the budget")
    found += [
        f"{key} {given[key]}: {words}"
        for key, value, words in _PREDICTED_OTHERWISE
        if given.get(key) == value
    ]
    option = str(given.get("activation_checkpoint.selective_ac_option", "2"))
    if given.get(RECOMPUTE, "selective") == "selective" and option != "op":
        found.append(
            f"activation_checkpoint.selective_ac_option {option}: one block in {option} is recomputed; "
            "predicted as all blocks without their products"
        )
    converters = given.get("model.converters")
    if converters:
        found.append(f"model.converters {converters}: predicted in the precision beside them")
    return found


def _incomparable(given: Mapping[str, Any]) -> list[str]:
    found = []
    if given.get("training.dtype", "float32") != "float32":
        found.append(
            f"training.dtype {given['training.dtype']}: weights and states without fp32 are not modelled"
        )
    if truth(given.get("training.enable_cpu_offload")):
        found.append("training.enable_cpu_offload: weights and states in host memory are not modelled")
    if whole(given.get("parallelism.expert_parallel_degree", 1)) != 1:
        found.append(
            "parallelism.expert_parallel_degree: torchtitan shares all other weights out among expert ranks, "
            "too; weft's ep does not"
        )
    return found + other_optimizer("optimizer.name", given.get("optimizer.name"))


# Options that weft predicts as their usual values.
_PREDICTED_OTHERWISE = (
    ("optimizer.implementation", "for-loop", "predicted as a fused step"),
    ("optimizer.early_step_in_backward", True, "predicted with a step after all backward passes"),
    ("parallelism.disable_loss_parallel", True, "predicted with a loss that tensor ranks divide"),
)
_CALL = "Trainer.Config"
# Configurations are small.
_MOST_CHARACTERS = 500_000
_TABLES = ("training", "parallelism", "compile")
_RECOMPUTES = {
    "FullAC.Config": "full",
    "SelectiveAC.Config": "selective",
    "MemoryBudgetAC.Config": "selective",
}


def configured(text: str) -> bool:
    """Return True for Python that builds a configuration of torchtitan."""
    return f"{_CALL}(" in text and bool(_functions(text))


def python_tables(text: str, name: str) -> tuple[Mapping[str, Any], Sequence[str]]:
    """Return the tables of the only configuration in a text, and the read keys that only code sets.

    Raises:
        InputError: when the text has several, which only an argument of torchtitan's tells apart.
    """
    functions = _functions(text)
    if len(functions) > 1:
        names = ", ".join([one.name for one in functions[:4]] + ["..."] * (len(functions) > 4))
        problem = f"{len(functions)} configurations ({names}); keep one function in the file"
        raise InputError(Violation(name, problem, functions[0].name))
    [function] = functions
    [call] = _calls(function)
    record: dict[str, Any] = {
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
        "model": _model_of_function(function, text),
    }
    for keyword in call.keywords:
        _put_table(record, keyword.arg, keyword.value)
    return record, _put_later_values(record, function, call)


def _put_table(record: dict[str, Any], name: str | None, node: ast.expr) -> None:
    """Put a table into a record, if weft reads it."""
    if name in _TABLES and isinstance(node, ast.Call):
        record[name] = _literals(node)
    elif name == "activation_checkpoint":
        record[name] = {"mode": _recompute_called(node), "selective_ac_option": "op"}
    elif name == "optimizer":
        record[name] = _optimizer_called(node)
    elif name == "model_converters":
        converters = re.findall(r"\w+Converter(?=\.Config\()", ast.unparse(node))
        record["model"] = record["model"] | {"converters": converters}


def _put_later_values(record: dict[str, Any], function: ast.FunctionDef, call: ast.Call) -> list[str]:
    """Put assigned values, `config.training.seq_len = 4096`, into a record.

    Values that code works out, or sets under a condition, are taken out. Their keys are returned, if weft
    reads them.
    """
    nodes = [
        node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
    ]
    nodes.sort(key=lambda node: node.lineno)
    pairs = [
        (ast.unparse(target), node)
        for node in nodes
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    names = {target for target, node in pairs if node.value is call}
    unread = []
    for path, node in pairs:
        name, _, key = path.partition(".")
        table, _, last = key.partition(".")
        if name not in names or not key or node.value is None:
            continue
        if not last:
            _put_table(record, table, node.value)
            continue
        plain = node in function.body and not isinstance(node, ast.AugAssign)
        value = _value(node.value) if plain else None
        record.setdefault(table, {})[last] = value
        if value is None and key in READ_KEYS[NAME]:
            unread.append(key)
    return unread


def _functions(text: str) -> list[ast.FunctionDef]:
    """Return the functions that build one configuration each."""
    if len(text) > _MOST_CHARACTERS:
        return []
    try:
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        return [function for function in functions if len(_calls(function)) == 1]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _calls(function: ast.FunctionDef) -> list[ast.Call]:
    nodes = ast.walk(function)
    return [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == _CALL]


def _literals(call: ast.Call) -> dict[str, Any]:
    """Return the keywords with literals, or products of two numbers, as values."""
    found = {keyword.arg: _value(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    return {key: value for key, value in found.items() if value is not None}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _value(node.left), _value(node.right)
        numbers = all(isinstance(side, int) and abs(side) < 2**31 for side in (left, right))
        return left * right if numbers else None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _optimizer_called(node: ast.expr) -> dict[str, Any]:
    """Return the name and the implementation of an optimizer; of several names one that is no Adam."""
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    words = [(word.arg, _value(word.value)) for call in calls for word in call.keywords if word.arg]
    names = [value for key, value in words if key in ("name", "optimizer_name") and isinstance(value, str)]
    name = next((one for one in names if one not in ("Adam", "AdamW")), names[0] if names else "AdamW")
    return {**dict(words), "name": name}


def _recompute_called(node: ast.expr) -> str | None:
    """Return the word for a class, or the `mode` of a call; None where neither is known."""
    if not isinstance(node, ast.Call):
        return "none" if ast.unparse(node) == "None" else None
    return _RECOMPUTES.get(ast.unparse(node.func)) or _literals(node).get("mode")


def _model_of_function(function: ast.FunctionDef, text: str) -> dict[str, Any]:
    """Return the flavor in a call of `model_registry`, where it is Llama's: each kind of model has one."""
    if "torchtitan.models.llama3" not in text and not function.name.startswith("llama3"):
        return {}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "model_registry" and node.args:
            flavor = _value(node.args[0])
            return {"name": "llama3", "flavor": flavor} if isinstance(flavor, str) else {}
    return {}
