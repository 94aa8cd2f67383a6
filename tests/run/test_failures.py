"""Which of several failures is the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import InputError, RunError, Violation
from weft.run.failures import PeerLostError, clear_failures, first_failure, logs_folder, write_failure


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    logs_folder(tmp_path).mkdir()
    return tmp_path


def test_the_earliest_own_error_comes_first(run_dir: Path) -> None:
    write_failure(run_dir, 0, PeerLostError("lost rank 2"))
    write_failure(run_dir, 2, RunError("the\nreason"))
    write_failure(run_dir, 1, ValueError("later"))
    failure = first_failure(run_dir, {0: 1, 1: 1, 2: 1, 3: -9})
    assert (failure.rank, failure.lines, failure.refused) == (2, ("the reason",), False)


def test_a_silent_death_explains_a_lost_peer(run_dir: Path) -> None:
    write_failure(run_dir, 0, PeerLostError("lost rank 2"))
    failure = first_failure(run_dir, {0: 1, 1: -15, 2: -9, 3: -15})
    assert failure.lines == ("rank 2 was killed by signal 9 (SIGKILL)",)


def test_of_silent_deaths_the_first_one_counts(run_dir: Path) -> None:
    failure = first_failure(run_dir, {2: -9, 0: -9, 1: -9})
    assert failure.lines == ("rank 2 was killed by signal 9 (SIGKILL)",)


def test_an_exit_without_a_word_is_named(run_dir: Path) -> None:
    assert first_failure(run_dir, {1: 7}).lines == ("rank 1 ended with exit code 7 and left no error",)


def test_other_errors_carry_their_type(run_dir: Path) -> None:
    write_failure(run_dir, 0, ValueError("bad\nvalue"))
    assert first_failure(run_dir, {0: 1}).lines == ("ValueError: bad value",)


def test_a_refusal_keeps_its_violations(run_dir: Path) -> None:
    write_failure(run_dir, 0, InputError([Violation("a", "first"), Violation("b", "second")]))
    failure = first_failure(run_dir, {0: 2})
    assert failure.refused
    assert failure.lines == ("a: first", "b: second")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"refused": true}'])
def test_a_half_written_word_counts_as_none(run_dir: Path, content: str) -> None:
    (logs_folder(run_dir) / "rank-0.failure.json").write_text(content)
    assert first_failure(run_dir, {0: -9}).silent


def test_earlier_attempts_are_forgotten(run_dir: Path) -> None:
    write_failure(run_dir, 0, RunError("of an earlier attempt"))
    clear_failures(run_dir)
    assert first_failure(run_dir, {0: -9}).silent
