"""The options of slow momentum (SlowMo; Wang et al., arXiv 1910.00643)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from weft.describe.synchronisation import LocalSteps
from weft.methods.local_averaging.options import outer_step_method

NAME = "slow-momentum"


class SlowMomentumOptions(LocalSteps):
    """The further keys of `[sync]` under `method = "slow-momentum"`."""

    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.5, description="the momentum's decay per averaging"
    )
    outer_learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="of the outer step; 1 without momentum goes to the mean itself"
    )


SYNC = outer_step_method(NAME, SlowMomentumOptions)
