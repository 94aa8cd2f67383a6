"""The collectives of tensor ranks inside a layer, and the obligation of programs that run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.describe.replica_grid import ReplicaGrid
from weft.program.kinds import KINDS, Kind
from weft.program.segments import CutInSegments
from weft.program.values import Read

TENSOR_FORWARD = KINDS.register(
    Kind(
        name="tensor_forward",
        symbol="Tf",
        stream="tensor_collective",
        reads=(Read("segment_output", consumes=True),),
        writes=("segment_input",),
        collective=True,
    )
)
TENSOR_BACKWARD = KINDS.register(
    Kind(
        name="tensor_backward",
        symbol="Tb",
        stream="tensor_collective",
        reads=(Read("segment_gradient", consumes=True),),
        writes=("border_gradient",),
        collective=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class ExchangesBetweenSegments(CutInSegments):
    """The obligation of each replica's tensor ranks to exchange between segments; one grid per stage."""

    grids: tuple[ReplicaGrid, ...]

    @property
    def facts(self) -> Mapping[str, str]:
        return {**super().facts, "collectives inside layers": "instructions"}
