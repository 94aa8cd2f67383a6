"""The options of local averaging, and the costs that all methods of its family share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from weft.describe.synchronisation import LocalSteps, SyncMethod, Wire, proposed_steps
from weft.errors import InputError, Violation

NAME = "local-averaging"
# The number of stages' weights, one for each rank, that an averaging left out.
LEFT_OUT = "weights_left_out"
# Keys of an outer step.
_OUTER_KEYS = ("outer_momentum", "outer_learning_rate")

# Weights are flattened, checked, weighted, added and copied back; optimizer states of lost replicas cleared.
AVERAGE_PASSES = 16.0
# Two states are read and written, and two tensors are computed from them. Two replicas share this out.
OUTER_PASSES = 5.0


class LocalAveragingOptions(LocalSteps):
    """The further keys of `[sync]` under `method = "local-averaging"`."""

    @model_validator(mode="before")
    @classmethod
    def _steps_outside(cls, record: Any) -> Any:
        found = [key for key in _OUTER_KEYS if isinstance(record, Mapping) and key in record]
        if found:
            problem = "local averaging has no outer step; sync.method diloco has one, with these keys"
            raise InputError([Violation(key, problem, "diloco") for key in found])
        return record


SYNC = SyncMethod(
    name=NAME,
    table=LocalAveragingOptions,
    local_gradients=True,
    wire=lambda options, plan: Wire(passes=AVERAGE_PASSES),
    proposals=proposed_steps,
)


def outer_step_method(name: str, table: type[LocalSteps]) -> SyncMethod:
    """Return a method whose ranks keep slices of the last agreed weights and of a momentum."""
    return SyncMethod(
        name=name,
        table=table,
        local_gradients=True,
        wire=lambda options, plan: Wire(passes=AVERAGE_PASSES + OUTER_PASSES),
        kept=lambda options, replicas: 2.0 / replicas,
        proposals=proposed_steps,
    )
