"""Which of several failures is the cause."""

from __future__ import annotations

import os

import pytest

from weft.errors import InputError, RunError, Violation
from weft.run.launch.failures import PeerLostError, first_failure, leave_word


def word(rank: int, error: BaseException) -> bytes:
    """What the agent reads."""
    ours, theirs = os.pipe()
    leave_word(theirs, rank, error)
    with os.fdopen(ours, "rb") as pipe:
        return pipe.read()


def test_the_earliest_own_error_comes_first() -> None:
    words = {0: word(0, PeerLostError("lost rank 2")), 2: word(2, RunError("the\nreason"))}
    words[1] = word(1, ValueError("later"))
    failure = first_failure(words, {0: 1, 1: 1, 2: 1, 3: -9})
    assert (failure.rank, failure.lines, failure.refused) == (2, ("the reason",), False)


def test_a_silent_death_explains_a_lost_peer() -> None:
    failure = first_failure({0: word(0, PeerLostError("lost rank 2"))}, {0: 1, 1: -15, 2: -9, 3: -15})
    assert failure.lines == ("rank 2 was killed by signal 9 (SIGKILL)",)


def test_of_silent_deaths_the_first_one_counts() -> None:
    failure = first_failure({}, {2: -9, 0: -9, 1: -9})
    assert failure.lines == ("rank 2 was killed by signal 9 (SIGKILL)",)


def test_an_exit_without_a_word_is_named() -> None:
    assert first_failure({}, {1: 7}).lines == ("rank 1 ended with exit code 7 and left no error",)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("bad\nvalue"), "ValueError: bad value"),
        (OSError(28, "No space left on device", "/run/a"), "rank 0: /run/a: No space left on device"),
        (OSError(5, "Input/output error"), "rank 0: a file: Input/output error"),
        (OSError("odd"), "rank 0: a file: odd"),
    ],
)
def test_other_errors_carry_their_type_or_their_file(error: Exception, line: str) -> None:
    assert first_failure({0: word(0, error)}, {0: 1}).lines == (line,)


def test_a_refusal_keeps_its_violations() -> None:
    refusal = InputError([Violation("a", "first"), Violation("b", "second")])
    failure = first_failure({0: word(0, refusal)}, {0: 2})
    assert failure.refused
    assert failure.lines == ("a: first", "b: second")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"refused": true}', b"\xff"])
def test_a_half_written_word_counts_as_none(content: bytes) -> None:
    assert first_failure({0: content}, {0: -9}).silent


def test_a_word_to_an_agent_that_is_gone_is_no_further_error() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    leave_word(theirs, 0, RunError("too late"))
