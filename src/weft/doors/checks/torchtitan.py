"""Rules for torchtitan's TOML."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.units import counted
from weft.doors.checks.base import (
    Finding,
    Rule,
    idle,
    nearest_divisor,
    nearest_multiple,
    number,
    on,
    slow,
    wrong,
)
from weft.doors.configuration import Configuration
from weft.doors.explain.torchtitan import (
    LAYERS_PER_STAGE,
    LOOPED,
    PRECISION,
    PRECISIONS,
    RECOMPUTE,
    RESHARD,
    SCHEDULE,
    SCHEDULE_CSV,
    is_compiled,
    schedule_name,
    stages_by_layers,
)
from weft.doors.keys import NOT_LEFT_OVER, TORCHTITAN
from weft.errors import nearest

_SINGLE = ("gpipe", "1f1b")
# The words of keys that have few; other optimizers are looked up elsewhere.
_WORDS = {
    RECOMPUTE: ("none", "selective", "full", "memory_budget"),
    RESHARD: ("default", "always", "never"),
    PRECISION: tuple(PRECISIONS),
    "optimizer.implementation": ("fused", "foreach", "for-loop"),
}
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW"}
_V_SHAPED = ("zbvzerobubble", "dualpipev")


def local_batch_is_split(configuration: Configuration) -> Iterator[Finding]:
    """Check that the local batch of a pipeline is a whole number of micro-batches."""
    if (configuration.layout.pp or 1) == 1:
        return
    keys = TORCHTITAN.only("local_batch")["local_batch"]
    key = next((key for key in keys if key in configuration.given), keys[0])
    local = number(configuration.given, key)
    size = number(configuration.given, TORCHTITAN.key("micro_batch_size"), 1) or 1
    if local is not None and local % size:
        problem = f"{local} is no multiple of micro-batches of {counted(size, 'sample')}"
        yield wrong(key, problem, str(nearest_multiple(local, size)))


def schedule_is_known(configuration: Configuration) -> Iterator[Finding]:
    """Check that the schedule is known, and has the stages that it runs."""
    if (configuration.layout.pp or 1) == 1:
        if SCHEDULE in configuration.given:
            yield idle(SCHEDULE, "read with a pipeline only; its degree is 1", "leave it out")
        return
    name, loops = schedule_name(configuration.given), configuration.layout.loops or 1
    if name in _SINGLE and loops > 1:
        yield wrong(SCHEDULE, f"{name} runs one stage per device, {loops} are listed", "Interleaved1F1B")
    elif name in LOOPED and loops == 1:
        yield wrong(SCHEDULE, f"{name} runs several stages per device, 1 is listed", "1F1B")
    elif name in _V_SHAPED and loops != 2:
        yield wrong(SCHEDULE, f"{name} runs two stages per device, {loops} are listed", "Interleaved1F1B")
    elif name not in _SINGLE + LOOPED and not configuration.given.get(SCHEDULE_CSV):
        yield wrong(SCHEDULE, f"{configuration.given.get(SCHEDULE)!r} is not a schedule", "Interleaved1F1B")


def overlap_is_compiled(configuration: Configuration) -> Iterator[Finding]:
    """Check that asynchronous tensor parallelism has the compiler, which makes it."""
    key = "parallelism.enable_async_tensor_parallel"
    if not on(configuration.given, key):
        return
    if not is_compiled(configuration.given):
        yield idle(key, "made by the compiler, which is off", "compile")
    if (configuration.layout.tp or 1) == 1:
        yield idle(key, "overlaps tensor ranks; there is 1", "leave it out")


def one_degree_is_left_over(configuration: Configuration) -> Iterator[Finding]:
    """Check that only the sharding degree is -1, the remaining ranks."""
    for key in map(TORCHTITAN.key, NOT_LEFT_OVER):
        if number(configuration.given, key) == -1:
            yield wrong(key, "-1; only data_parallel_shard_degree can be what is left over", "1")


def batch_is_accumulated(configuration: Configuration) -> Iterator[Finding]:
    """Find accumulation with weights that are gathered for every micro-batch."""
    batch, unit = configuration.global_batch, configuration.samples_per_round
    size = configuration.layout.micro_batch_size
    if batch is None or size is None or unit is None or (configuration.layout.pp or 1) > 1:
        return
    count = batch // unit
    if count > 1 and configuration.layout.sharding == "zero-3" and configuration.sequence is not None:
        problem = f"{counted(count, 'micro-batch')} of {size}: weights are gathered twice for each of them"
        near = nearest_divisor(2 * size, size * count)
        yield slow(TORCHTITAN.key("local_batch"), problem, f"{near}, where it fits")


def tokens_are_divided(configuration: Configuration) -> Iterator[Finding]:
    """Check that torchtitan's tensor and context ranks divide the tokens of a sample."""
    tokens, unit = configuration.sequence, 2 * configuration.layout.width
    if tokens is not None and unit > 2 and tokens % unit:
        problem = f"{tokens} tokens are no multiple of tp x 2 cp = {unit}"
        yield wrong(TORCHTITAN.key("sequence"), problem, str(nearest_multiple(tokens, unit)))


def layers_make_stages(configuration: Configuration) -> Iterator[Finding]:
    """Check that layers per stage make equally many stages on each device."""
    stages, devices = stages_by_layers(configuration.given), configuration.layout.pp or 1
    if stages is not None and stages % devices:
        problem = f"makes {stages} stages, which {counted(devices, 'device')} do not divide"
        yield wrong(LAYERS_PER_STAGE, problem, "leave it out")


def words_are_known(configuration: Configuration) -> Iterator[Finding]:
    """Check the words of keys that have few, and the capitals of optimizers."""
    given = configuration.given
    for key, words in _WORDS.items():
        if key in given and given[key] is not None and given[key] not in words:
            yield wrong(key, f"{given[key]!r}: {', '.join(words)}", nearest(str(given[key]), words))
    name = str(given.get("optimizer.name", "AdamW"))
    usual = _OPTIMIZERS.get(name.lower(), name)
    if name != usual:
        yield wrong("optimizer.name", f"{name!r}: capitals count", usual)


RULES: tuple[Rule, ...] = (
    words_are_known,
    layers_make_stages,
    local_batch_is_split,
    schedule_is_known,
    tokens_are_divided,
    overlap_is_compiled,
    one_degree_is_left_over,
    batch_is_accumulated,
)
