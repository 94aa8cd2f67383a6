"""What the rows of a Timeline are called and which stream they belong to."""

from __future__ import annotations

from weft.program.kinds import KINDS, all_kinds
from weft.program.program import NONE


def stream_names() -> tuple[str, ...]:
    """Names of all streams; `Timeline.stream` and `Program.stream` count in this order."""
    return tuple(dict.fromkeys(kind.stream for kind in all_kinds()))


def label(kind: int, stage: int, micro_batch: int) -> str:
    """A short name such as ``F2.1``."""
    text = KINDS[kind].symbol + ("" if stage == NONE else str(stage))
    return text if micro_batch == NONE else f"{text}.{micro_batch}"
