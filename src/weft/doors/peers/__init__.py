"""Programs of others that estimate or plan training, run beside weft on the same problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.doors.peers import calculon, metis
from weft.doors.peers.calculon import Calculon
from weft.doors.peers.metis import Metis
from weft.doors.peers.program import LIMIT_S, PeerProgram
from weft.errors import InputError, Violation, require_choice

# What is run of each one's clone.
PEERS = {"calculon": calculon.COMMAND, "metis": metis.SCRIPT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Those that a user named: judges of plans, and planners."""

    judges: tuple[Calculon, ...] = ()
    planners: tuple[Metis, ...] = ()


def named_peers(words: Sequence[str], *, python: str | None = None, limit_s: float = LIMIT_S) -> Peers:
    """The peers of words like `calculon=/path/to/its/clone`, run by this Python for so many seconds at most.

    Raises:
        InputError: for an unknown name, one without a clone or named twice, and no time at all.
    """
    if not limit_s > 0.0:
        raise InputError(Violation("--peer-seconds", f"{limit_s:g}: a program needs some seconds", "300"))
    programs: dict[str, PeerProgram] = {}
    for word in words:
        name, _, path = word.partition("=")
        require_choice("--peer", name, PEERS)
        if not Path(path).is_dir() or not path:
            problem = f"{word!r} names no folder with a clone of {name}"
            raise InputError(Violation("--peer", problem, f"{name}=/path/to/{name}"))
        if name in programs:
            raise InputError(Violation("--peer", f"{name} is named twice"))
        programs[name] = PeerProgram(name=name, root=Path(path), python=python, limit_s=limit_s)
        programs[name].require(PEERS[name])
    return Peers(
        judges=tuple(Calculon(program=programs[name]) for name in programs if name == "calculon"),
        planners=tuple(Metis(program=programs[name]) for name in programs if name == "metis"),
    )
