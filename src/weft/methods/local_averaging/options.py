"""The options of local averaging: keys of `[sync]`, and options of a plan's `sync`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from weft.describe.plan import Plan
from weft.describe.synchronisation import SyncMethod, Wire, proposed_steps, sync_options
from weft.describe.toml_table import Count, TomlTable

NAME = "local-averaging"


class LocalAveragingOptions(TomlTable):
    """The further keys of `[sync]` under `method = "local-averaging"`."""

    every: Count = Field(description="steps that replicas take by themselves between two averagings")
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="of Nesterov's step from the last averaged weights towards the new mean"
    )
    outer_learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="of that step; 1 without momentum goes to the mean itself"
    )

    @property
    def steps_outside(self) -> bool:
        """True if an outer step moves weights to other values than the mean."""
        return self.outer_momentum != 0.0 or self.outer_learning_rate != 1.0


# Weights are read and written when they are flattened, weighted, added and copied back.
_AVERAGE_PASSES = 8.0
# The outer step reads the mean, reads and writes anchor and momentum, and computes two tensors from them.
_OUTER_PASSES = 10.0


def _wire(options: LocalAveragingOptions, plan: Plan) -> Wire:
    return Wire(passes=_AVERAGE_PASSES + (_OUTER_PASSES if options.steps_outside else 0.0))


SYNC = SyncMethod(
    name=NAME,
    table=LocalAveragingOptions,
    local_gradients=True,
    wire=_wire,
    proposals=proposed_steps,
)


def options_of(plan: Plan) -> LocalAveragingOptions | None:
    """Return the options of local averaging in a plan, or None if it has another `sync`.

    Raises:
        InputError: for unknown, missing or wrong options.
    """
    if plan.sync.name != NAME:
        return None
    options = sync_options(NAME, plan.sync.options, "plan: sync.options")
    assert isinstance(options, LocalAveragingOptions), "its own table checks them"
    return options
