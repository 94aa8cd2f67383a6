"""torchtitan's configurations in Python: the literals in a call of `Trainer.Config`; nothing is run.

A module of torchtitan has a function for each configuration, `Trainer.Config(training=TrainingConfig(...))`.
Its keywords are the tables of earlier versions' TOML, with the same keys.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from weft.errors import InputError, Violation

_CALL = "Trainer.Config"
# Configurations are small.
_MOST_CHARACTERS = 500_000
_TABLES = ("training", "parallelism", "compile")
_RECOMPUTES = {
    "FullAC.Config": "full",
    "SelectiveAC.Config": "selective",
    "MemoryBudgetAC.Config": "selective",
}


def configured(text: str) -> bool:
    """Return True for Python that builds a configuration of torchtitan."""
    return f"{_CALL}(" in text and bool(_functions(text))


def python_tables(text: str, name: str) -> Mapping[str, Any]:
    """Return the tables of the only configuration in a text, with their literal values.

    Raises:
        InputError: when the text has several, which only an argument of torchtitan's tells apart.
    """
    functions = _functions(text)
    if len(functions) > 1:
        names = ", ".join([one.name for one in functions[:4]] + ["..."] * (len(functions) > 4))
        problem = f"{len(functions)} configurations ({names}); keep one function in the file"
        raise InputError(Violation(name, problem, functions[0].name))
    [function] = functions
    [call] = _calls(function)
    record: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg in _TABLES and isinstance(keyword.value, ast.Call):
            record[keyword.arg] = _literals(keyword.value)
        elif keyword.arg == "activation_checkpoint":
            record[keyword.arg] = {"mode": _recompute(keyword.value), "selective_ac_option": "op"}
    record.setdefault("activation_checkpoint", {"mode": "selective", "selective_ac_option": "op"})
    return record | {"model": _model(function, text)}


def _functions(text: str) -> list[ast.FunctionDef]:
    """Return the functions that build one configuration each."""
    if len(text) > _MOST_CHARACTERS:
        return []
    try:
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        return [function for function in functions if len(_calls(function)) == 1]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _calls(function: ast.FunctionDef) -> list[ast.Call]:
    nodes = ast.walk(function)
    return [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == _CALL]


def _literals(call: ast.Call) -> dict[str, Any]:
    """Return the keywords with literals, or products of two numbers, as values."""
    found = {keyword.arg: _value(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    return {key: value for key, value in found.items() if value is not None}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _value(node.left), _value(node.right)
        numbers = all(isinstance(side, int) and abs(side) < 2**31 for side in (left, right))
        return left * right if numbers else None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _recompute(node: ast.expr) -> str:
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return _RECOMPUTES.get(called, "none")


def _model(function: ast.FunctionDef, text: str) -> dict[str, Any]:
    """Return the flavor in a call of `model_registry`, where it is Llama's: each kind of model has one."""
    if "torchtitan.models.llama3" not in text and not function.name.startswith("llama3"):
        return {}
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "model_registry" and node.args:
            flavor = _value(node.args[0])
            return {"name": "llama3", "flavor": flavor} if isinstance(flavor, str) else {}
    return {}
