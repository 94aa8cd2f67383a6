"""What the tables of RUN.toml and CLUSTER.toml have in common."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from weft.describe.one_line import one_line

# Steps, samples and tokens are 64-bit integers whose products must stay so.
Count = Annotated[int, Field(ge=1, le=10**9)]
Word = Annotated[str, Field(min_length=1)]
# TOML has no tuples; strictness inside them is kept.
TOML_ARRAY = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
IMPORTABLE = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"


class TomlTable(BaseModel):
    """Unknown keys are refused, and so are values of another type, infinite and undefined numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __repr__(self) -> str:
        return one_line(self)

    def __str__(self) -> str:
        return repr(self)


def is_importable(name: str) -> bool:
    """Whether a name has the form `package.module:function`."""
    return re.fullmatch(IMPORTABLE, name) is not None
