"""Stated mutations fit the source of today; whoever changes a piece that one is about changes it, too."""

from __future__ import annotations

import pytest
from mutants.mutations import ROOT, Mutation, StaleError, mutations, rooms

STATED = mutations(rooms())


@pytest.mark.parametrize("mutation", STATED, ids=lambda one: f"{one.room}: {one.breaks}")
def test_the_source_has_the_piece_once_and_the_change_is_a_program(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    changed = mutation.applied(text)
    assert changed != text
    compile(changed, mutation.file, "exec")
    assert mutation.tests
    assert [name for name in mutation.tests if not _is_there(*name.split("::"))] == []


def _is_there(path: str, test: str = "") -> bool:
    """True if there is such a file, and such a test in it."""
    if not (ROOT / path).is_file():
        return False
    function = test.partition("[")[0]
    return not test or f"def {function}(" in (ROOT / path).read_text(encoding="utf-8")


def test_every_mutation_has_a_line_of_its_own() -> None:
    lines = [mutation.breaks for mutation in STATED]
    assert len(lines) >= 40
    assert sorted(set(lines)) == sorted(lines)
    assert [line for line in lines if "\n" in line] == []


def test_a_piece_that_is_gone_or_there_twice_is_refused() -> None:
    one = Mutation(room="a", breaks="b", file="c", piece="x + 1", replacement="x", tests=("t",))
    assert one.applied("y = x + 1\n") == "y = x\n"
    for text, times in (("y = x\n", 0), ("x + 1\nx + 1\n", 2)):
        with pytest.raises(StaleError, match=f"c has the piece {times} times"):
            one.applied(text)
