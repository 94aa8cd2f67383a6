"""All moves of this installation, by name: weft's own and those of third parties.

A method contributes its moves (`weft.bundles`). A third party adds moves alone through the entry-point group
`weft.moves`. The entry point names a function without arguments that returns a sequence of moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.bundles import others, parts, parts_of
from weft.describe.contract import Contract
from weft.describe.plan import Choice
from weft.describe.run_file import RunFile
from weft.describe.run_tables.methods import run_tables
from weft.describe.synchronisation import AUTO
from weft.errors import InputError, Violation, nearest
from weft.installed import installed
from weft.moves.move import Move, Purpose
from weft.moves.parallelism import ONE_UNIT_MOVES, PARALLELISM_MOVES
from weft.moves.schedules import schedule_moves

SYNCHRONISATION_MOVES: tuple[Move, ...] = (
    Move(
        name="sync dense",
        contract=Contract.EXACT,
        summary="Every replica adds the full gradients of all others, stage by stage, during backward.",
        source="Li et al., PyTorch Distributed, arXiv 2006.15704",
        verify="gradients equal one process (float64, 1e-9) for every (pp, dp) up to four ranks",
        applies=lambda context: (
            "the plan already synchronises densely" if context.plan.sync.name == "dense" else None
        ),
        apply=lambda context: context.plan.model_copy(update={"sync": Choice(name="dense")}),
        purposes=frozenset(),
        asked_by=("sync.method", "dense"),
    ),
)


def moves_for(purpose: Purpose, contract: Contract) -> tuple[Move, ...]:
    """Return the moves for a purpose within a goal's contract; moves of other packages come first."""
    moves = (*_of_others(), *_own())
    return tuple(move for move in moves if purpose in move.purposes and move.contract <= contract)


def kept_out(contract: Contract) -> tuple[Move, ...]:
    """Return the moves that planners would try if the goal's contract admitted them."""
    return tuple(move for move in all_moves().values() if move.purposes and move.contract > contract)


def all_moves() -> Mapping[str, Move]:
    """Return every known move by name.

    Raises:
        InputError: when two moves share a name.
    """
    table: dict[str, Move] = {}
    for move in (*_own(), *_of_others()):
        if move.name in table:
            raise InputError(Violation("moves", f"two moves are called {move.name!r}"))
        table[move.name] = move
    return table


def _own() -> Iterator[Move]:
    """Yield weft's own moves, and one move for each registered schedule."""
    foreign = parts_of(Move, others())
    yield from schedule_moves()
    yield from (*PARALLELISM_MOVES, *SYNCHRONISATION_MOVES)
    yield from (move for move in parts(Move) if move not in foreign)
    yield from ONE_UNIT_MOVES


def _of_others() -> Iterator[Move]:
    """Yield the moves of other packages: from their methods, and from the group `weft.moves`."""
    yield from parts_of(Move, others())
    for _, named in installed("weft.moves"):
        yield from named()


_METHOD = "sync.method"


def sync_contracts() -> Mapping[str, Contract]:
    """Return the contract of every synchronisation method, by its word in run files."""
    asked = [(move.contract, *move.asked_by) for move in all_moves().values() if move.asked_by is not None]
    return {word: contract for contract, key, word in asked if key == _METHOD}


def refused_pins(run: RunFile) -> list[Violation]:
    """Return violations for pins without a move, and for moves and tables outside the goal's contract."""
    asked = [(move, *move.asked_by) for move in all_moves().values() if move.asked_by is not None]
    problems = [
        _kept_out(move, key, word, run.goal.contract)
        for move, key, word in asked
        if word in _pinned(run, key) and move.contract > Contract.of(run.goal.contract)
    ]
    methods = sorted([AUTO, *sync_contracts()])
    for method in _pinned(run, _METHOD):
        if method not in methods:
            problem = f"{method!r} is not one of {', '.join(methods)}"
            problems.append(Violation(_METHOD, problem, nearest(method, methods)))
    goal = Contract.of(run.goal.contract)
    tables = {name: table for name, table in run_tables().items() if name in run.methods}
    for name, table in tables.items():
        contract = table.contract(run.methods[name])
        if contract > goal:
            problem = f"{run.goal.contract!r} keeps out [{name}], which is {contract.word}"
            problems.append(Violation("goal.contract", problem, contract.word))
    return problems


def _kept_out(move: Move, key: str, word: str, contract: str) -> Violation:
    problem = f"{contract!r} keeps out {key} {word!r}, which is {move.contract.word}"
    return Violation("goal.contract", problem, move.contract.word)


def _pinned(run: RunFile, key: str) -> tuple[str, ...]:
    """Return the run file's words under `TABLE.KEY`."""
    table, _, name = key.partition(".")
    given = getattr(getattr(run, table), name)
    if given is None:
        return ()
    return given if isinstance(given, tuple) else (given,)
