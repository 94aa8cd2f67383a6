"""torch: how replicas agree, one file per method, chosen by `Plan.sync.name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.describe.plan import Choice
from weft.errors import InputError, Violation, require_choice
from weft.sync.base import Synchroniser
from weft.sync.dense import Dense

SYNCHRONISERS: Mapping[str, Callable[[], Synchroniser]] = {"dense": Dense}


def get_synchroniser(choice: Choice) -> Synchroniser:
    """The method of that name.

    Raises:
        InputError: for a name that is not known, or options that the method does not have.
    """
    require_choice("sync", choice.name, SYNCHRONISERS)
    if choice.options:
        given = ", ".join(sorted(choice.options))
        raise InputError(Violation("sync", f"{choice.name!r} takes no options, given {given}"))
    return SYNCHRONISERS[choice.name]()
