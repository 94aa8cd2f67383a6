"""The options of PowerSGD: keys of `[sync]`, and options of a plan's `sync`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from weft.describe.toml_table import Count, TomlTable

NAME = "power-sgd"


class PowerSgdOptions(TomlTable):
    """The further keys of `[sync]` under `method = "power-sgd"`."""

    rank: Count = Field(default=4, description="columns of each of the two factors of a matrix")
    start_step: Annotated[int, Field(ge=0)] = Field(
        default=0, description="the first step that sends factors; earlier ones send whole gradients"
    )
    minimum_compression: Annotated[float, Field(gt=0)] = Field(
        default=2.0, description="least elements of a matrix for each of its factors; others are sent whole"
    )

    def rank_of(self, rows: int, columns: int) -> int:
        """Return the columns of the factors of a matrix, at most its own; 0 if it is sent whole."""
        rank = min(self.rank, rows, columns)
        factors = rank * (rows + columns)
        return rank if rows * columns >= self.minimum_compression * factors else 0
