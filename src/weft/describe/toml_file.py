"""Reading TOML into pydantic models, with every violation on one line and the nearest valid key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from weft.errors import InputError, Violation, nearest

Model = TypeVar("Model", bound=BaseModel)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        InputError: when the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise InputError(Violation(str(path), error.strerror or str(error))) from None
    except UnicodeDecodeError as error:
        raise InputError(Violation(str(path), f"not UTF-8 text: byte {error.start}")) from None
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InputError(Violation(str(path), f"not TOML: {error}")) from None


def validate(model: type[Model], record: Mapping[str, Any], where: str) -> Model:
    """`record` as a `model`.

    Raises:
        InputError: with every violation; an unknown key comes with the nearest valid one.
    """
    try:
        return model.model_validate(record)
    except ValidationError as error:
        raise InputError([_violation(model, item, where) for item in error.errors()]) from None


def _violation(model: type[BaseModel], item: Mapping[str, Any], where: str) -> Violation:
    location = item["loc"]
    path = ".".join(str(part) for part in location)
    place = f"{where}: {path}" if where and path else where or path
    if item["type"] == "extra_forbidden":
        valid = _valid_keys(model, location[:-1])
        problem = f"unknown key; valid here: {', '.join(sorted(valid))}"
        return Violation(place, problem, nearest(str(location[-1]), valid))
    if item["type"] == "missing":
        return Violation(place, "is missing")
    given = item.get("input")
    message = str(item["msg"]).removeprefix("Value error, ")
    if isinstance(given, Mapping | list) or item["type"] == "value_error":
        return Violation(place, message)
    return Violation(place, f"{_short(given)}: {message}", _nearest_literal(item, given))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _nearest_literal(item: Mapping[str, Any], given: object) -> str:
    if item["type"] != "literal_error" or not isinstance(given, str):
        return ""
    options = [option.strip(" '") for option in str(item["ctx"]["expected"]).replace(" or ", ", ").split(",")]
    return nearest(given, options)


def _valid_keys(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int) or current is None:
            continue
        field = _field(current, part)
        current = _inner_model(field.annotation) if field is not None else None
    if current is None:
        return []
    return [field.alias or name for name, field in current.model_fields.items()]


def _field(model: type[BaseModel], key: str) -> Any:
    for name, field in model.model_fields.items():
        if key in (name, field.alias):
            return field
    return None


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    """The record type inside an annotation such as `tuple[Node, ...]`, `Mapping[str, Node]` or `Node | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is not None or isinstance(annotation, type(Union)):
        for inner in get_args(annotation):
            found = _inner_model(inner)
            if found is not None:
                return found
    return None
