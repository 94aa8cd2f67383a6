"""All moves of this installation, by name: weft's own and those of third parties.

A method contributes its moves (`weft.bundles`). A third party adds moves alone through the entry-point group
`weft.moves`: the entry point names a function that takes nothing and returns a sequence of moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from weft.bundles import others, parts, parts_of
from weft.describe.contract import Contract
from weft.errors import InputError, Violation, nearest
from weft.installed import installed
from weft.moves.move import Move, Purpose
from weft.moves.one_unit import ONE_UNIT_MOVES
from weft.moves.parallelism import PARALLELISM_MOVES
from weft.moves.schedules import schedule_moves
from weft.moves.synchronisation import SYNCHRONISATION_MOVES


def moves_for(purpose: Purpose, contract: Contract) -> tuple[Move, ...]:
    """What planners try for a purpose within a goal's contract; moves of other packages first."""
    # Those of methods are among all moves, too.
    installed_first = dict.fromkeys((*parts_of(Move, others()), *_named_moves(), *all_moves().values()))
    return tuple(move for move in installed_first if purpose in move.purposes and move.contract <= contract)


def _named_moves() -> Iterator[Move]:
    return chain.from_iterable(named() for _, named in installed("weft.moves"))


def kept_out(contract: Contract) -> tuple[Move, ...]:
    """The moves that planners would try if the goal's contract admitted them."""
    return tuple(move for move in all_moves().values() if move.purposes and move.contract > contract)


def all_moves() -> Mapping[str, Move]:
    """Every known move by name.

    Raises:
        InputError: when two moves share a name.
    """
    moves = [
        *schedule_moves(),
        *PARALLELISM_MOVES,
        *SYNCHRONISATION_MOVES,
        *parts(Move),
        *ONE_UNIT_MOVES,
        *_named_moves(),
    ]
    table: dict[str, Move] = {}
    for move in moves:
        if move.name in table:
            raise InputError(Violation("moves", f"two moves are called {move.name!r}"))
        table[move.name] = move
    return table


def get_move(name: str) -> Move:
    """The move of that name.

    Raises:
        InputError: when there is none, with the nearest name.
    """
    table = all_moves()
    if name not in table:
        known = ", ".join(sorted(table))
        raise InputError(Violation("moves", f"{name!r} is not one of {known}", nearest(name, table)))
    return table[name]
