"""The options of distributed sign momentum (arXiv 2411.17866)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.describe.plan import Plan
from weft.describe.synchronisation import LocalSteps, SyncMethod, Wire, proposed_steps
from weft.methods.local_averaging.options import AVERAGE_PASSES, OUTER_PASSES

NAME = "sign-momentum"

Beta = Annotated[float, Field(ge=0, lt=1)]
# The parts of an fp32 number that the download of a sign takes.
_SIGN = 2.0 / 32.0
# Signs are packed and unpacked, and every rank moves its own copy of all weights.
_SIGN_PASSES = 4.0


class SignMomentumOptions(LocalSteps):
    """The further keys of `[sync]` under `method = "sign-momentum"`."""

    outer_learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="of the outer step, in learning rates of the local steps"
    )
    beta1: Beta = Field(default=0.95, description="the momentum's part in the outer step's direction")
    beta2: Beta = Field(default=0.98, description="the momentum's decay per averaging")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="of the outer step, of all weights"
    )
    sign: Literal["exact", "random"] = Field(
        default="exact", description="random: flip signs so that their mean is the direction, scaled"
    )
    download: Literal["signs", "weights"] = Field(
        default="signs", description="what ranks send each other after the step; all get the same weights"
    )


def _wire(options: SignMomentumOptions, plan: Plan) -> Wire:
    if options.download == "weights":
        return Wire(passes=AVERAGE_PASSES + OUTER_PASSES)
    # Half of an all-reduce's bytes go up as they are; the other half come down as signs.
    sent = (1.0 + _SIGN) / 2.0
    return Wire(inside=sent, between=sent, passes=AVERAGE_PASSES + OUTER_PASSES + _SIGN_PASSES)


SYNC = SyncMethod(
    name=NAME,
    table=SignMomentumOptions,
    local_gradients=True,
    proposals=proposed_steps,
    wire=_wire,
    kept=lambda options, replicas: 1.0 + 1.0 / replicas,
)
