"""The class of a task that is a user's own; without torch, unless the user's module imports it."""

from __future__ import annotations

from typing import Any

from weft.errors import InputError, Violation
from weft.installed import imported


def task_class(kind: str) -> type[Any]:
    """Return the class that `package.module:Task` names.

    Raises:
        InputError: when it cannot be imported, or lacks a method of a task.
    """
    found: type[Any] = imported("task.kind", kind)
    missing = [method for method in ("batch", "loss") if not callable(getattr(found, method, None))]
    if missing:
        raise InputError(Violation("task.kind", f"{kind!r} is no task: it has no {' and no '.join(missing)}"))
    return found
