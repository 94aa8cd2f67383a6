"""`ListedNode`: a node as a list of nodes names it."""

from __future__ import annotations

from dataclasses import dataclass

from weft.describe.one_line import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedNode:
    """One node of a list, with devices of one kind.

    Attributes:
        device: the devices' name in the list; empty when it names none.
        memory_bytes: of one device, where the list says it.
        hints: other words of the node that may name the device, such as features.
        unusable: why no job gets the node now, such as DOWN; empty when jobs do.
    """

    name: str
    device: str
    devices: int
    memory_bytes: int | None = None
    hints: tuple[str, ...] = ()
    unusable: str = ""

    __repr__ = one_line
