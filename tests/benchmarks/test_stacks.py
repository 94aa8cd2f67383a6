"""The table of what stacks answered, and what scripts start, for the benchmark of the doors."""

from __future__ import annotations

import json

import pytest

from benchmarks.stacks.launched import program_of, ranks_started, started
from benchmarks.stacks.table import Asked, answers_of, rows

LOSSES = {"even": (), "odd": ("lost: a half; nearest: 2",), "looped": ("lost: x; nearest: register x",)}


def lines(*records: dict[str, str]) -> str:
    return "a warning\n" + "".join(json.dumps(record) + "\n" for record in records)


def answered() -> Asked:
    said = [("even", ""), ("odd", "3 is odd"), ("looped", "no loops")]
    out = lines({"version": "1.2"}, *({"name": name, "said": text} for name, text in said))
    return answers_of("megatron", out, "", losses=LOSSES, not_written={"bert": "no bert"})


def test_plans_are_accepted_or_refused_with_the_stacks_own_words() -> None:
    asked = answered()
    assert (asked.version, asked.accepted) == ("1.2", ("even",))
    assert asked.refused == {"odd": "3 is odd", "looped": "no loops"}


def test_a_refusal_is_a_fault_unless_a_loss_says_what_to_do_first() -> None:
    assert answered().refused_unsaid == ("odd",)


def test_the_table_has_a_line_for_each_reason() -> None:
    first, *others = rows(answered())
    assert "plans   3   accepted   1   refused   2   not written   1" in first
    assert others == [
        "  refused: odd: 3 is odd",
        "  refused (said to be lost): looped: no loops",
        "  not written: bert: no bert",
    ]


def test_a_program_that_ends_early_is_skipped_with_its_last_words() -> None:
    asked = answers_of("k8s", lines({"version": "1"}), "Traceback\nno yaml", losses=LOSSES, not_written={})
    assert rows(asked) == ["k8s              skipped: it ended early: no yaml"]


def test_a_script_is_run_up_to_its_launcher() -> None:
    words = started('SIZE=4\ntorchrun --nnodes 1 train.py --size "$SIZE"', "torchrun", {})
    assert program_of(words, "train.py") == ["--size", "4"]


def test_ranks_of_unlike_nodes_are_counted_one_by_one() -> None:
    script = 'torchrun --nnodes 2 --nproc-per-node "$((8 - 4 * NODE_RANK))" train.py'
    assert ranks_started(script) == 12


@pytest.mark.parametrize(
    ("script", "line"),
    [("exit 3", "bash ends with 3"), ("true", "torchrun is never called")],
)
def test_a_script_that_starts_nothing_is_refused(script: str, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        started(script, "torchrun", {})
