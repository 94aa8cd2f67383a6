"""torch: how replicas agree, one file per method, chosen by `Plan.sync.name`.

A package of others names a class that follows `weft.sync.base.Synchroniser` in the entry-point group
`weft.synchronisers`, and a move that says what it keeps in `weft.moves`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.describe.plan import Choice
from weft.errors import InputError, Violation, require_choice
from weft.installed import installed
from weft.sync.base import Synchroniser
from weft.sync.dense import Dense

SYNCHRONISERS: Mapping[str, Callable[[], Synchroniser]] = {"dense": Dense}


def _all_synchronisers() -> Mapping[str, Callable[[], Synchroniser]]:
    table = dict(SYNCHRONISERS)
    for name, named in installed("weft.synchronisers"):
        if name in table:
            raise InputError(Violation("sync", f"two methods are called {name!r}"))
        table[name] = named
    return table


def get_synchroniser(choice: Choice) -> Synchroniser:
    """The method of that name.

    Raises:
        InputError: for a name that is not known, or options that the method does not have.
    """
    known = _all_synchronisers()
    require_choice("sync", choice.name, known)
    if choice.options:
        given = ", ".join(sorted(choice.options))
        raise InputError(Violation("sync", f"{choice.name!r} takes no options, given {given}"))
    return known[choice.name]()
