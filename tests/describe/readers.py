"""Who reads a key of a file: a walk over the package's syntax, for tests that find keys without effect.

A read is an attribute of something that is known to be of the class: by its annotation, by the field of
another class that holds it, or by an assignment from one of these. A name alone proves nothing: plans, too,
have a `schedule`, and moves a `contract`.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import weft

ROOT = Path(weft.__file__).parent
Key = tuple[type, str]


def sources(*, under: Iterable[str] = (), without: Iterable[str] = ()) -> dict[str, str]:
    """Texts of the package's modules by their path in it, in these rooms, or in all but those."""
    rooms, others = tuple(under), tuple(without)
    paths = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
    return {
        name: path.read_text(encoding="utf-8")
        for name, path in paths.items()
        if (not rooms or name.startswith(rooms)) and not (others and name.startswith(others))
    }


@cache
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def keys_of(tables: Iterable[type]) -> set[Key]:
    """The keys of the classes, each of the class that declares it: heirs have the same key."""
    return {(_declaring(table, name), name) for table in tables for name in _types_of_fields(table)}


def _declaring(table: type, name: str) -> type:
    return next(one for one in reversed(table.__mro__) if name in _types_of_fields(one))


def tables_under(table: type) -> list[type]:
    """The class and all that its fields hold, whatever collections lie between."""
    found = [table]
    for one in found:
        for annotation in _types_of_fields(one).values():
            found += [inner for inner in _classes_in(annotation) if _has_fields(inner) and inner not in found]
    return found


@dataclass
class Reads:
    """What the modules read of some classes.

    `owners` are names of attributes that hold one of them wherever they occur, such as `run` of a planned
    job; `makers` are names of functions that return one.
    """

    tables: list[type]
    owners: Mapping[str, type]
    makers: Mapping[str, type]
    _known: dict[str, set[Key]] = field(default_factory=dict)

    def of(self, modules: Mapping[str, str]) -> set[Key]:
        """What is read in modules, given by their texts."""
        for text in modules.values():
            if text not in self._known:
                self._known[text] = {key for scope in _scopes(_tree(text)) for key in self._in(scope)}
        return set().union(*(self._known[text] for text in modules.values()))

    def _in(self, scope: ast.AST) -> Iterator[Key]:
        names = self._names(scope)
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                table = self._type_of(node.value, names)
                if table is not None:
                    yield from self._fields_behind(table, node.attr)

    def _names(self, scope: ast.AST) -> dict[str, type]:
        """Classes of the names in a function; twice, as one may come from another."""
        bases = [base for table in self.tables for base in table.__mro__[1:] if _types_of_fields(base)]
        by_name = {one.__name__: one for one in (*bases, *self.tables)}
        names: dict[str, type] = {}
        for node in ast.walk(scope):
            if isinstance(node, ast.arg) and node.annotation is not None:
                for word in ast.walk(node.annotation):
                    if isinstance(word, ast.Name) and word.id in by_name:
                        names[node.arg] = by_name[word.id]
        for _ in range(2):
            for target, value in _bindings(scope):
                table = self._type_of(value, names)
                if isinstance(target, ast.Name) and table is not None:
                    names[target.id] = table
        return names

    def _type_of(self, node: ast.AST, names: Mapping[str, type]) -> type | None:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "get" and isinstance(node.func, ast.Attribute):
                return self._type_of(node.func.value, names)
            return self.makers.get(name)
        if isinstance(node, ast.BoolOp):
            return next((found for one in node.values if (found := self._type_of(one, names))), None)
        if isinstance(node, ast.Subscript):
            return self._type_of(node.value, names)
        if not isinstance(node, ast.Attribute):
            return None
        holder = self._type_of(node.value, names)
        if holder is None:
            return self.owners.get(node.attr)
        held = _classes_in(_types_of_fields(holder).get(node.attr))
        return next((one for one in held if one in self.tables), None)

    def _fields_behind(self, table: type, name: str) -> set[Key]:
        """The field, or those that a property of the class reads."""
        if name in _types_of_fields(table):
            return {(_declaring(table, name), name)}
        read = getattr(table, name, None)
        if not isinstance(read, property) or read.fget is None:
            return set()
        inside = [one for one in read.fget.__code__.co_names if one in _types_of_fields(table)]
        return {(_declaring(table, one), one) for one in inside}


def _scopes(module: ast.Module) -> Iterator[ast.AST]:
    """Functions and methods with all inside them."""
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield from node.body
        else:
            yield node


def _bindings(scope: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(target, value) of assignments, several at once too, loops and comprehensions."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value
        elif isinstance(node, ast.NamedExpr | ast.comprehension | ast.For):
            value = node.value if isinstance(node, ast.NamedExpr) else node.iter
            if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "enumerate":
                value = value.args[0]
                yield node.target.elts[-1], value  # type: ignore[union-attr]
            else:
                yield node.target, value


@cache
def _types_of_fields(table: type) -> dict[str, Any]:
    if issubclass(table, BaseModel):
        return {name: one.annotation for name, one in table.model_fields.items()}
    if is_dataclass(table):
        hints = typing.get_type_hints(table)
        return {one.name: hints[one.name] for one in fields(table)}
    return {}


def _has_fields(kind: type) -> bool:
    return issubclass(kind, BaseModel) or is_dataclass(kind)


def _classes_in(annotation: Any) -> list[type]:
    arguments = typing.get_args(annotation)
    if not arguments:
        return [annotation] if isinstance(annotation, type) else []
    return [found for argument in arguments for found in _classes_in(argument)]
