"""Run files from the keywords of commands and of `weft.plan`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.describe.models import PRESETS, resolve_model
from weft.describe.run_file import RunFile, parse_run
from weft.describe.tasks import default_task
from weft.describe.toml_table import is_importable


def run_of_keywords(
    *,
    model: str | None,
    on: str,
    global_batch: int | None,
    sequence: int | None,
    precision: str | None,
    pins: Mapping[str, Any],
) -> RunFile:
    """Return the run file of these keywords, with defaults for all other keys.

    Raises:
        InputError: with all mistakes in the keywords.
    """
    known = model if model is not None and (model in PRESETS or Path(model).exists()) else None
    tables: dict[str, dict[str, Any]] = {
        "model": {_model_key(model): model},
        "task": {"kind": None if known is None else default_task(resolve_model(known)), "sequence": sequence},
        "train": {"global_batch": global_batch, "precision": precision},
        "cluster": {"use": on},
        "plan": dict(pins),
    }
    given = {
        table: {key: value for key, value in keys.items() if value is not None}
        for table, keys in tables.items()
    }
    return parse_run({table: keys for table, keys in given.items() if keys})


def _model_key(model: str | None) -> str:
    """Return the key of the run file's [model] table for a name."""
    if model is not None and Path(model).exists():
        return "hf"
    return "build" if model is not None and is_importable(model) else "preset"
