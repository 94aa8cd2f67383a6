"""Files of other stacks that say given values, by dotted key."""

from __future__ import annotations

import json
from typing import Any

import yaml

from weft.describe.toml_table import value_text


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as tables."""
    record: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, last = key.split(".")
        table = record
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return record


def written(stack: str, flat: dict[str, Any]) -> str:
    """A file of the stack that says it."""
    if stack == "Megatron-LM":
        return "pretrain_gpt.py " + " ".join(f"{key} {value}" for key, value in flat.items())
    if stack == "DeepSpeed":
        return json.dumps(nested(flat))
    if stack != "torchtitan":
        return yaml.safe_dump(nested(flat))
    tables: dict[str, list[str]] = {"training": [], "parallelism": []}
    for key, value in flat.items():
        table, _, name = key.partition(".")
        if value is not None and not isinstance(value, dict):
            items = [one for one in value if one is not None] if isinstance(value, list) else value
            tables.setdefault(table, []).append(f"{name} = {value_text(items)}")
    return "\n".join("\n".join([f"[{table}]", *lines]) for table, lines in tables.items())
