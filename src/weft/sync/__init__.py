"""torch: synchronisers, the methods by which replicas agree, chosen by `Plan.sync.name`.

A third-party package names a class that follows `weft.sync.base.Synchroniser` in the entry-point group
`weft.synchronisers`. It names a move with the method's contract in the group `weft.moves`. A method with
options contributes a `SyncMethod` (`weft.describe.synchronisation`) and a `SynchroniserOf` for the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weft.bundles import runtime_parts
from weft.describe.plan import Choice
from weft.describe.synchronisation import SYNCHRONISERS as PACKAGES
from weft.describe.synchronisation import sync_options, sync_problem
from weft.describe.toml_table import TomlTable
from weft.errors import InputError, Violation
from weft.installed import installed
from weft.sync.base import Synchroniser, SynchroniserOf
from weft.sync.dense import Dense

SYNCHRONISERS: Mapping[str, Callable[[], Synchroniser]] = {"dense": Dense}


def get_synchroniser(choice: Choice) -> Synchroniser:
    """Return the synchroniser with the name and options of `choice`, for all stages of one rank.

    Raises:
        InputError: for an unknown or ambiguous name, or options that the method does not have.
    """
    if (problem := sync_problem(choice)) is not None:
        raise InputError(problem)
    plain, of_methods = _all_synchronisers()
    if choice.name in of_methods:
        return of_methods[choice.name](sync_options(choice.name, choice.options))
    return plain[choice.name]()


def _all_synchronisers() -> tuple[
    Mapping[str, Callable[[], Synchroniser]], Mapping[str, Callable[[TomlTable], Synchroniser]]
]:
    """Return the synchronisers without options, and the ones with options, contributed by methods."""
    of_methods = {one.name: one.make for one in runtime_parts(SynchroniserOf)}
    plain = dict(SYNCHRONISERS)
    for name, named in installed(PACKAGES):
        if name in {**plain, **of_methods}:
            raise InputError(Violation("sync", f"two methods are called {name!r}"))
        plain[name] = named
    return plain, of_methods
