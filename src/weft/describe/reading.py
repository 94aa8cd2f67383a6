"""Readers of files that people write: every problem becomes one violation, never a traceback."""

from __future__ import annotations

import json
import math
import re
import tomllib
import typing
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest


def read_toml(path: Path | str) -> dict[str, Any]:
    """Read the tables of a TOML file.

    Raises:
        InputError: when the file cannot be read, or is not TOML, with line and column.
    """
    return parse_toml(read_text(path), str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse the tables of a TOML text; `where` names it in messages.

    Raises:
        InputError: when the text is not TOML, with line and column.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(Violation(where, f"not a TOML file: {_reason(error)}")) from None


def read_json(path: Path | str) -> Any:
    """Read the value of a JSON file; infinite and undefined numbers, and repeated keys, are refused.

    Raises:
        InputError: when the file cannot be read, or is not JSON, with line and column.
    """
    try:
        return json.loads(
            read_text(path), parse_constant=_finite, parse_float=_finite, object_pairs_hook=_distinct
        )
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(Violation(str(path), f"not a JSON file: {_reason(error)}")) from None


def holds_json(path: Path | str) -> bool:
    """Return True if a file is JSON, False if it is TOML. Its content decides, whatever its name.

    Raises:
        InputError: when the file cannot be read, or is neither. A mistake in it is for its own reader, which
            the first character or a usual name tells.
    """
    text, suffix = read_text(path), Path(path).suffix
    if text.lstrip().startswith("{") or suffix == ".json":
        return True
    if suffix != ".toml":
        try:
            tomllib.loads(text)
        except (ValueError, RecursionError):
            problem = "neither TOML, as run files, nor a JSON object, as plan files"
            raise InputError(Violation(str(path), problem)) from None
    return False


def read_text(path: Path | str) -> str:
    """Read the text of a UTF-8 file, without the byte order mark that some editors write.

    Raises:
        InputError: when it does not exist, is not a file, is not text, or cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(Violation(str(path), "no such file")) from None
    except IsADirectoryError:
        raise InputError(Violation(str(path), "a folder, not a file")) from None
    except UnicodeDecodeError as error:
        raise InputError(Violation(str(path), f"not UTF-8 text (byte {error.start})")) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(Violation(shown(str(path)), f"cannot be read: {reason}")) from None


def violations_of(error: ValidationError, where: str, model: type[BaseModel]) -> list[Violation]:
    """Return a violation for each of pydantic's errors; unknown keys and values get the nearest valid one."""
    violations: list[Violation] = []
    items = error.errors(include_url=False)
    for item in items:
        location = item["loc"]
        if item["type"] == "too_short" and any(_is_inside(other["loc"], location) for other in items):
            continue  # the items that a list lacks have mistakes of their own
        if location[-1:] in _NO_KEYS and item["type"] not in ("extra_forbidden", "missing"):
            location = location[:-1]
        place = _join(where, key_path(location))
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, InputError):
            violations += [
                Violation(_join(place, inner.where), inner.problem, inner.nearest)
                for inner in cause.violations
            ]
        elif item["type"] == "extra_forbidden":
            known = _fields_at(model, location[:-1])
            key = str(location[-1])
            allowed = f"; allowed are {', '.join(known)}" if known else ""
            meant = _OTHER_WORDS.get(key, key)
            tables = "" if meant in known else ", ".join(_tables_with(model, meant))
            elsewhere = f"; {'it' if meant == key else meant} is a key of {tables}" if tables else ""
            near = meant if meant in known else "" if tables else nearest(key, known)
            violations.append(Violation(place, f"unknown key{allowed}{elsewhere}", near))
        elif item["type"] == "missing":
            violations.append(Violation(place, "missing"))
        elif item["loc"][-1:] in _ALTERNATIVES:
            violations.append(
                Violation(place, f"{shown(item['input'])}: must be a number, text, true or false")
            )
        else:
            violations.append(_wrong_value(place, item["input"], item["msg"], item.get("ctx", {})))
    # The alternatives of one value fail one by one.
    return list(dict.fromkeys(violations))


def _is_inside(location: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    return len(location) > len(other) and location[: len(other)] == other


# Words of other trainers, and the key of a run file for each.
_OTHER_WORDS = {
    **dict.fromkeys(("lr", "max_lr", "base_lr"), "learning_rate"),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type", "scheduler", "lr_schedule"), "schedule"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "global_batch"),
    **dict.fromkeys(("gradient_accumulation_steps", "per_device_train_batch_size"), "micro_batch_size"),
    **dict.fromkeys(("max_steps", "num_steps", "iterations", "epochs", "num_train_epochs"), "steps"),
    **dict.fromkeys(("seq_len", "seq_length", "sequence_length", "max_length", "max_seq_length"), "sequence"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "grad_clip", "gradient_clipping"), "clip_norm"),
    **dict.fromkeys(("eval_steps", "eval_every", "eval_interval"), "evaluate_every"),
    **dict.fromkeys(("save_steps", "save_every", "save_interval"), "every"),
    "save_total_limit": "keep",
    "dtype": "precision",
    "dataset": "data",
    "report_to": "log",
}
# pydantic's additions to a location: for the alternatives of a plain value, and for a key.
_ALTERNATIVES = (("int",), ("float",), ("str",), ("bool",))
_NO_KEYS = (*_ALTERNATIVES, ("[key]",))


def _wrong_value(place: str, given: object, message: str, context: Mapping[str, Any]) -> Violation:
    near = ""
    if isinstance(given, str):
        options = [
            part.strip("'") for part in str(context.get("expected", "")).replace(" or ", ", ").split(", ")
        ]
        near = nearest(given, options)
        if given.isdecimal() and "integer" in message:
            near = given
    elif isinstance(given, int | float) and "ge" in context:
        near = str(context["ge"])
    return Violation(place, f"{shown(given)}: {_in_words(message)}", near)


def _in_words(message: str) -> str:
    """Return pydantic's message in the words of TOML instead of Python."""
    message = re.sub(r"^(Input|String|Tuple|List|Dictionary) should", "must", message)
    message = re.sub(r"a valid (tuple|list)$", "a list", message)
    message = re.sub(r" (after validation, not|, not) \d+$", "", message)
    return re.sub(r"(an? valid dictionary or instance of \w+|an? valid dictionary)$", "a table", message)


def key_path(location: tuple[int | str, ...]) -> str:
    """Return the path of a value in nested tables, such as ``stages[2].replicas``."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _join(where: str, key: str) -> str:
    return f"{where}: {key}" if where and key else where or key


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the table at `location` inside `model`, with their names in files."""
    for part in location:
        if isinstance(part, int) or part not in {name for name, _ in _aliases(model)}:
            continue
        annotation = next(field for name, field in _aliases(model) if name == part)
        tables = [inner for inner in _types_in(annotation) if issubclass(inner, BaseModel)]
        if not tables:
            return []
        model = tables[0]
    return [name for name, _ in _aliases(model)]


def _tables_with(model: type[BaseModel], key: str) -> list[str]:
    """Return the tables right below `model` that have a key, as files head them."""
    return [
        f"[{name}]"
        for name, annotation in _aliases(model)
        if any(
            key in _fields_at(inner, ()) for inner in _types_in(annotation) if issubclass(inner, BaseModel)
        )
    ]


def _aliases(model: type[BaseModel]) -> list[tuple[str, Any]]:
    return [(field.alias or name, field.annotation) for name, field in model.model_fields.items()]


def _types_in(annotation: Any) -> list[type]:
    """Return all classes in a type such as ``Mapping[str, Table] | None``."""
    arguments = typing.get_args(annotation)
    if not arguments:
        return [annotation] if isinstance(annotation, type) else []
    return [found for argument in arguments for found in _types_in(argument)]


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {shown(twice)} is given more than once in one object")
    return found


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
