"""Output of all commands: JSON on standard output, or text and pictures for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from weft.cli.tables.timeline import TimelinePicture
from weft.timeline.timeline import Timeline
from weft.web.charts.timeline import timeline_svg

Json = Annotated[bool, Parameter(name="--json", negative=(), help="Answer as JSON.")]


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    print(json.dumps(value, indent=1, sort_keys=True))


def console() -> Console:
    return Console(highlight=False)


def print_timeline(timeline: Timeline, svg: Path | None, title: str) -> None:
    """Draw a timeline, and write it as a picture to `svg`, if given."""
    console().print(TimelinePicture(timeline))
    if svg is not None:
        svg.write_text(timeline_svg(timeline, title=title))
        print(f"wrote {svg}")
