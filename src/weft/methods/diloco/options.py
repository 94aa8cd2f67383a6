"""The options of DiLoCo (Douillard et al., arXiv 2311.08105)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from weft.describe.synchronisation import LocalSteps
from weft.methods.local_averaging.options import outer_step_method

NAME = "diloco"


class DilocoOptions(LocalSteps):
    """The further keys of `[sync]` under `method = "diloco"`."""

    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9, description="of Nesterov's step from the last averaged weights towards the new mean"
    )
    outer_learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=0.7, description="of that step; 1 without momentum goes to the mean itself"
    )


SYNC = outer_step_method(NAME, DilocoOptions)
