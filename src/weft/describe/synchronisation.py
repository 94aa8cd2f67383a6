"""How replicas agree: what a plan's `sync` can say; methods contribute it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from weft.bundles import parts
from weft.describe.plan import Choice
from weft.describe.reading import violations_of
from weft.describe.toml_table import TomlTable
from weft.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What replicas send and compute to agree, for each byte that they agree on.

    Attributes:
        inside, between: bytes on links inside nodes, and between them.
        passes: how many bytes each rank reads or writes for it.
    """

    inside: float = 1.0
    between: float = 1.0
    passes: float = 0.0


# Everything is sent as it is.
AS_IT_IS = Wire()


@dataclass(frozen=True, kw_only=True)
class SyncMethod:
    """One word of `sync.method`.

    Attributes:
        name: the word.
        table: the keys that it adds to `[sync]`, which are the options of a plan's `sync`.
        wire: what is sent and computed, from its options.
        local_gradients: each replica steps with its own gradient, which is not added to those of others.
    """

    name: str
    table: type[TomlTable]
    local_gradients: bool = False
    wire: Callable[[Any], Wire] = lambda options: AS_IT_IS


def sync_methods() -> Mapping[str, SyncMethod]:
    """By name; a way to agree that takes no options need not be among them."""
    return {one.name: one for one in parts(SyncMethod)}


def keeps_gradients_local(sync: Choice) -> bool:
    """Return whether each replica steps with its own gradient."""
    method = sync_methods().get(sync.name)
    return method is not None and method.local_gradients


def sync_words(sync: Choice) -> str:
    """How replicas agree, in words."""
    options = (f"{name.replace('_', ' ')} {value}" for name, value in sync.options.items())
    return ", ".join([sync.name, *options])


def wire_of(sync: Choice) -> Wire:
    """What replicas send and compute to agree.

    Raises:
        InputError: as `sync_options` does.
    """
    method = sync_methods().get(sync.name)
    return AS_IT_IS if method is None else method.wire(sync_options(sync.name, sync.options))


def sync_options(name: str, given: Mapping[str, Any], where: str = "sync") -> TomlTable:
    """Return the options of a way to agree that takes some, checked.

    Raises:
        InputError: listing everything that is wrong with the options.
    """
    table = sync_methods()[name].table
    try:
        return table.model_validate(dict(given))
    except ValidationError as error:
        raise InputError(violations_of(error, where, table)) from None
