"""The check of a run file's pins against the moves of this installation."""

from __future__ import annotations

from weft.describe.contract import Contract
from weft.describe.run_file import RunFile
from weft.describe.run_tables.methods import run_tables
from weft.errors import Violation, nearest
from weft.moves.move import Move
from weft.moves.registry import all_moves

_METHOD = "sync.method"


def refused_pins(run: RunFile) -> list[Violation]:
    """Return violations for pins without a move, and for moves and tables outside the goal's contract."""
    asked = [(move, *move.asked_by) for move in all_moves().values() if move.asked_by is not None]
    problems = [
        _kept_out(move, key, word, run.goal.contract)
        for move, key, word in asked
        if word in _pinned(run, key) and move.contract > Contract.of(run.goal.contract)
    ]
    methods = sorted(word for _, key, word in asked if key == _METHOD)
    for method in _pinned(run, _METHOD):
        if method not in methods:
            problem = f"{method!r} is not one of {', '.join(methods)}"
            problems.append(Violation(_METHOD, problem, nearest(method, methods)))
    goal = Contract.of(run.goal.contract)
    tables = [table for name, table in run_tables().items() if name in run.methods]
    for table in tables:
        if table.contract > goal:
            problem = f"{run.goal.contract!r} keeps out [{table.method}], which is {table.contract.word}"
            problems.append(Violation("goal.contract", problem, table.contract.word))
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
