"""Every count of the table is read, and what the table says is written is what emitters write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doors.files import written
from doors.jobs import planned, run_of

from weft.doors.configuration import Configuration
from weft.doors.emit import emit
from weft.doors.explain import READERS, read_configuration
from weft.doors.keys import (
    ACCELERATE,
    ACCELERATE_ULYSSES,
    AXOLOTL,
    DEEPSPEED,
    IN_DEEPSPEED,
    IN_MEGATRON,
    IN_SIZES,
    MEGATRON_LM,
    TORCHTITAN,
    Keys,
    Name,
)

TABLE = {
    "DeepSpeed": DEEPSPEED,
    "Accelerate": ACCELERATE,
    "Axolotl": AXOLOTL,
    "torchtitan": TORCHTITAN,
    "Megatron-LM": MEGATRON_LM,
}
# What else a file says, so that every count of its stack means something.
BESIDE: dict[str, dict[str, Any]] = {
    "DeepSpeed": {"zero_optimization.stage": 3},
    "Accelerate": {"distributed_type": "FSDP"} | dict.fromkeys(ACCELERATE.written_in(IN_SIZES).values(), 2),
    "Axolotl": {"base_model": "gpt2", "datasets": "mine", "dp_shard_size": 2},
    "torchtitan": {TORCHTITAN.key("pp"): 2, TORCHTITAN.key("shard"): 2},
    "Megatron-LM": {"--use-distributed-optimizer": "", "--nproc-per-node": 8, "--nnodes": 3},
}
COUNTS = [
    (stack, name, key) for stack, keys in TABLE.items() for name in keys.counts for key in keys.counts[name]
]
PARTS = [(stack, key) for stack, keys in TABLE.items() for row in keys.parts.values() for key in row]
# Layouts for which the emitters write all that they can; Accelerate has a plugin for each.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"pp": 2, "dp": 2, "tp": 2, "cp": 2, "sharding": "zero-1"},
    {"dp": 4, "tp": 2, "cp": 2, "sharding": "zero-3", "island": 2},
    {"dp": 16, "sharding": "zero-1"},
)


def reading(stack: str, said: dict[str, Any]) -> Configuration:
    """What is read of a file, but for the file itself."""
    return replace(read_configuration(written(stack, said), "file"), given={})


def test_every_stack_that_is_read_has_a_block() -> None:
    assert set(TABLE) == set(READERS)


@pytest.mark.parametrize(("stack", "name", "key"), COUNTS)
def test_a_count_is_read_by_each_of_its_keys(stack: str, name: Name, key: str) -> None:
    others = {other for row in TABLE[stack].only(name).values() for other in row}
    beside = {other: value for other, value in BESIDE[stack].items() if other not in others}
    found = reading(stack, beside | {key: 3})
    assert getattr(found.layout if hasattr(found.layout, name) else found, name) == 3
    assert found.key(name) == key


@pytest.mark.parametrize(("stack", "key"), PARTS)
def test_a_part_changes_what_is_read(stack: str, key: str) -> None:
    assert reading(stack, BESIDE[stack] | {key: 1}) != reading(stack, BESIDE[stack] | {key: 3})


def test_accelerate_divides_samples_in_another_way_by_another_key() -> None:
    key = ACCELERATE_ULYSSES.key("cp")
    found = reading("Accelerate", BESIDE["Accelerate"] | {ACCELERATE.key("cp"): 1, key: 3})
    assert (found.layout.cp, found.key("cp")) == (3, key)


@pytest.mark.parametrize(
    ("stack", "keys", "sections"),
    [
        ("megatron", MEGATRON_LM, [""]),
        ("torchtitan", TORCHTITAN, [""]),
        ("torchtitan-toml", TORCHTITAN, [""]),
        ("deepspeed", DEEPSPEED, [""]),
        ("accelerate", ACCELERATE, ["", IN_MEGATRON, IN_SIZES, IN_DEEPSPEED]),
    ],
)
def test_emitters_write_the_keys_that_the_table_says_and_no_other(
    stack: str, keys: Keys, sections: list[str]
) -> None:
    rows = {**keys.counts, **keys.parts}
    files = [emit(planned(run_of("llama-3-8b"), **layout), stack) for layout in LAYOUTS]
    said = {key for file in files for key in read_configuration(file.text, file.file).given}
    expected = {key for section in sections for key in keys.written_in(section).values()}
    assert said & {key for row in rows.values() for key in row} == expected


def test_what_is_read_and_not_written_is_known() -> None:
    """A row that is forgotten in `written` fails here; nothing is written for Axolotl."""
    unwritten = {stack: {*keys.counts, *keys.parts} - {*keys.written} for stack, keys in TABLE.items()}
    assert unwritten.pop("Axolotl") == {*AXOLOTL.counts, *AXOLOTL.parts}
    assert {stack: names for stack, names in unwritten.items() if names} == {"DeepSpeed": {"shard"}}


def test_a_value_is_written_by_its_key_in_the_order_of_the_file() -> None:
    values = {"pp": 2, "tp": 4, "dp": 8, "cp": None, "micro_batches": 16}
    assert list(MEGATRON_LM.values(values).items()) == [
        ("--tensor-model-parallel-size", 4),
        ("--pipeline-model-parallel-size", 2),
    ]
    assert ACCELERATE.values(values, IN_SIZES) == {"tp_size": 4}
    assert ACCELERATE.values(values, IN_MEGATRON) == {"tp_degree": 4, "pp_degree": 2, "num_micro_batches": 16}


def test_groups_of_replicas_express_islands_where_they_are_written() -> None:
    assert "island" in TORCHTITAN.expressed()
    assert "island" in ACCELERATE.expressed(IN_SIZES)
    assert "island" not in ACCELERATE.expressed(IN_MEGATRON) | DEEPSPEED.expressed() | AXOLOTL.expressed()
