"""Readers for the texts of other stacks: mappings of JSON, YAML and TOML, or None for other texts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

import yaml

# Configurations are small; longer texts are traces or data.
_MOST_CHARACTERS = 2_000_000


def json_mapping(text: str) -> Mapping[str, Any] | None:
    """Return the object of a JSON text."""
    if len(text) > _MOST_CHARACTERS or not text.lstrip().startswith("{"):
        return None
    try:
        return _mapping(json.loads(text))
    except (ValueError, RecursionError):
        return None


def toml_mapping(text: str) -> Mapping[str, Any] | None:
    """Return the tables of a TOML text."""
    if len(text) > _MOST_CHARACTERS:
        return None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def yaml_mapping(text: str) -> Mapping[str, Any] | None:
    """Return the mapping of a YAML text that is not JSON."""
    if len(text) > _MOST_CHARACTERS or text.lstrip().startswith("{"):
        return None
    try:
        return _mapping(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def broken(text: str) -> str | None:
    """Return the error of a text that begins like JSON and is invalid; None for others."""
    if len(text) > _MOST_CHARACTERS or not text.lstrip().startswith("{"):
        return None
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
    except (ValueError, RecursionError):
        return "not valid JSON"
    return None


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None
