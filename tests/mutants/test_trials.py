"""Trials of a small tree: what its tests notice of wrong changes, and that the tree stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants.mutations import Mutation
from mutants.trials import Trials, Verdict

SOURCE = """
def twice(number: int) -> int:
    return 2 * number


def half(number: int) -> int:
    return number // 2
"""
TEST = """
from doubled import half, twice


def test_of_one() -> None:
    assert twice(1) == 2
    assert half(1) == 0
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in (("src/doubled.py", SOURCE), ("tests/test_doubled.py", TEST), ("pyproject.toml", "")):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


def change(piece: str, replacement: str) -> Mutation:
    tests = ("tests/test_doubled.py",)
    return Mutation(
        room="", breaks="", file="src/doubled.py", piece=piece, replacement=replacement, tests=tests
    )


def test_verdicts_are_those_of_the_tests_on_each_change_alone(tree: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    (tmp_path / "copy").mkdir()
    trials = Trials(tree, tmp_path / "copy")
    # Of one length, and within a second: none may run what was compiled of another.
    assert trials.verdict(change("2 * number", "3 * number")) is Verdict.CAUGHT
    assert trials.verdict(change("number // 2", "number // 3")) is Verdict.SURVIVED
    assert trials.verdict(change("2 * number", "2 + number")) is Verdict.CAUGHT
    assert trials.verdict(change("def half", "def haIf")) is Verdict.BROKEN
    assert trials.passes(["tests/test_doubled.py"])
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before
