"""What `rich` prints of a table or a picture."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def text_of(renderable: RenderableType, width: int = 80, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
