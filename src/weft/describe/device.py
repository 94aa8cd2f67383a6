"""`Device`: a processor, with the figures of its data sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.describe.one_line import one_line

PRECISION_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

# A precision of single products in trainings of another one.
FP8 = "fp8"

# Reserve on a device that is not its own host, for the driver's context and the workspaces of libraries.
# Communicators come on top: each plan counts its own.
RESERVE_BYTES = 2**29
# Communicators of a usual plan, two of 0.5 GiB. Planners cut stages beside so many before they know the plan.
USUAL_COMMUNICATOR_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One computing device.

    Attributes:
        flops_per_s: dense peak by precision (`fp64`, `fp32`, `bf16`, `fp16`, and `fp8` of single products); a
            missing precision is not supported.
        memory_bytes, memory_bytes_per_s: capacity and peak bandwidth of the device's own memory.
        reserve_bytes: memory that no plan gets: the driver's context, workspaces of libraries, communicators.
            None: `RESERVE_BYTES` beside communicators, or nothing on a synchronous device.
        launch_s: host time to launch one kernel.
        synchronous: the host thread itself computes (a CPU), so it posts nothing while a kernel runs.
        host_bytes_per_s: peak bandwidth to host memory in one direction; None: as the catalogue says.
        price_per_hour: in the user's currency; None until the user gives one.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    reserve_bytes: int | None = None
    launch_s: float = 5e-6
    synchronous: bool = False
    host_bytes_per_s: float | None = None
    price_per_hour: float | None = None

    __repr__ = one_line

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors can take, and communicators outside of the reserve."""
        usual_bytes = 0 if self.synchronous else RESERVE_BYTES
        return self.memory_bytes - (usual_bytes if self.reserve_bytes is None else self.reserve_bytes)

    @property
    def holds_communicators(self) -> bool:
        """True if communicators take memory beside the reserve; a given reserve has room for them."""
        return not self.synchronous and self.reserve_bytes is None

    @property
    def room_bytes(self) -> int:
        """Bytes that tensors can take beside the communicators of a usual plan."""
        return self.usable_bytes - (USUAL_COMMUNICATOR_BYTES if self.holds_communicators else 0)
