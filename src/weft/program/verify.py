"""The verifier: a proof of a Program from any builder, before launch.

Every obligation is met exactly once on the right ranks. Every value of a known or unknown kind is made before
it is read, whole until then and used up. Messages and collectives agree at all ends. The obligations to
methods are met. No order of events under rendezvous sends can hang.
"""

from __future__ import annotations

from weft.errors import InputError, Violation
from weft.program.checks.columns import check_coordinates, check_shape
from weft.program.checks.deadlock import check_deadlock
from weft.program.checks.messages import check_collectives, check_messages
from weft.program.checks.obligations import check_obligations
from weft.program.checks.values import check_values
from weft.program.passes import ordered_passes
from weft.program.program import Program


def verify(program: Program) -> list[Violation]:
    """Return all violations in `program`; an empty list proves it."""
    broken = check_shape(program)
    if broken:
        return broken
    return [
        violation
        for check in (
            check_coordinates,
            check_obligations,
            check_values,
            check_messages,
            check_collectives,
            _check_methods,
            check_deadlock,
        )
        for violation in check(program)
    ]


def _check_methods(program: Program) -> list[Violation]:
    owed = program.obligations.methods
    return [problem for one in ordered_passes() for problem in one.check(program, owed.get(one.name))]


def require_valid(program: Program) -> None:
    """Check that `verify` finds no violation in the program.

    Raises:
        InputError: with all violations.
    """
    problems = verify(program)
    if problems:
        raise InputError(problems)
