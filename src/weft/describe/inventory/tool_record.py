"""`ToolRecord`: a record of a tool's JSON, as far as weft reads it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from weft.describe.one_line import one_line


class ToolRecord(BaseModel):
    """A record whose other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def __repr__(self) -> str:
        return one_line(self)

    def __str__(self) -> str:
        return repr(self)
