"""HiGHS, loaded where a program is solved and silent."""

from __future__ import annotations

from functools import cache
from typing import Any


def silent_solver() -> Any:
    """Return a new solver of one thread that prints nothing."""
    solver = _silent_class()()
    solver.setOptionValue("threads", 1)
    return solver


@cache
def _silent_class() -> Any:
    import highspy

    class Silent(highspy.Highs):  # type: ignore[misc]
        """A solver that prints nothing; a plain one prints a line when it is made."""

        def enableCallbacks(self) -> None:  # noqa: N802
            self.silent()
            super().enableCallbacks()

    return Silent
