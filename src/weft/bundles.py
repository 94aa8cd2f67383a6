"""Bundles: the contributions of each method to the rooms of weft, found by folder and by entry point.

A method is one folder, `weft/methods/NAME/`. Its `BUNDLE` lists all contributions: kinds of instructions,
a pass, costs, cards, run-file tables. Each room defines the type of its contributions and collects them by
that type; it never names a method. A package of another author names its `BUNDLE` in the entry-point group
`weft.methods`.

Contributions to the runtime need torch. They are in a separate module, which only the execution of a program
imports.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

from weft.errors import InputError, Violation
from weft.installed import imported, installed

HOME = "weft.methods"
ENTRY_POINTS = "weft.methods"

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One method.

    Attributes:
        name: the method's name for users, files and tables.
        parts: its contributions; each room picks the types that it defines.
        runtime: the module with its `PARTS` for the runtime; None if the method only plans.
    """

    name: str
    parts: tuple[object, ...] = ()
    runtime: str | None = None


@cache
def bundles() -> Mapping[str, Bundle]:
    """Return all methods of this installation by name: weft's own by folder, then other packages' methods.

    Raises:
        InputError: when two methods have one name, or an entry point names no `Bundle`.
    """
    found: dict[str, Bundle] = {}
    for bundle in (*_own(), *others()):
        if bundle.name in found:
            raise InputError(Violation("methods", f"two methods are called {bundle.name!r}"))
        found[bundle.name] = bundle
    return found


@cache
def others() -> tuple[Bundle, ...]:
    """Return the methods of other packages, sorted by name.

    Raises:
        InputError: when an entry point names no `Bundle`.
    """
    named = [loaded for _, loaded in sorted(installed(ENTRY_POINTS), key=lambda one: one.name)]
    for loaded in named:
        if not isinstance(loaded, Bundle):
            problem = f"{loaded!r} is a {type(loaded).__name__}, not a Bundle"
            raise InputError(Violation(f"entry point {ENTRY_POINTS}", problem))
        _require_parts(f"method {loaded.name}: parts", loaded.parts)
    return tuple(named)


@cache
def parts(kind: type[Part]) -> tuple[Part, ...]:
    """Return the contributions of one type, in the order of the methods."""
    return parts_of(kind, bundles().values())


@cache
def runtime_parts(kind: type[Part]) -> tuple[Part, ...]:
    """Return the contributions of one type to the runtime; import torch for them.

    Raises:
        InputError: when a method's runtime cannot be imported, or lists no parts.
    """
    return tuple(
        part for bundle in bundles().values() for part in _runtime_of(bundle) if isinstance(part, kind)
    )


def own_runtimes() -> Iterator[str]:
    """Name the modules that weft's own methods add to the runtime; they import torch."""
    return (bundle.runtime for bundle in _own() if bundle.runtime is not None)


def parts_of(kind: type[Part], some: Iterable[Bundle]) -> tuple[Part, ...]:
    """Return the contributions of one type from the given methods."""
    return tuple(part for bundle in some for part in bundle.parts if isinstance(part, kind))


def _runtime_of(bundle: Bundle) -> Iterable[object]:
    """Return all contributions of a method to the runtime."""
    if bundle.runtime is None:
        return ()
    where = f"method {bundle.name}: runtime"
    return _require_parts(where, imported(where, f"{bundle.runtime}:PARTS"))


def _require_parts(where: str, listed: object) -> Iterable[object]:
    """Return the parts that another package lists; a class among them would have no effect.

    Raises:
        InputError: when they are no parts.
    """
    if not isinstance(listed, tuple | list):
        raise InputError(Violation(where, f"is {type(listed).__name__}, no tuple of parts"))
    for one in listed:
        if isinstance(one, type):
            raise InputError(Violation(where, f"{one.__name__} is a class; a part is an object of it"))
    return listed


def _own() -> Iterable[Bundle]:
    home = find_spec(HOME)
    assert home is not None, "the folder of methods is part of weft"
    folders = pkgutil.iter_modules(home.submodule_search_locations)
    for name in sorted(module.name for module in folders if module.ispkg):
        yield import_module(f"{HOME}.{name}").BUNDLE
