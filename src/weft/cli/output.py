"""One way to answer: JSON on standard output, or text and pictures for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

Json = Annotated[bool, Parameter(name="--json", negative=(), help="Answer as JSON.")]


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    print(json.dumps(value, indent=1, sort_keys=True))


def console() -> Console:
    return Console(highlight=False)
