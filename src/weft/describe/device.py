"""`Device`: a processor, with the figures of its data sheet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.describe.one_line import one_line

PRECISION_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

# A precision of single products in trainings of another one.
FP8 = "fp8"

# Memory of the driver's context, the workspaces of libraries and the buffers of communicators on a device
# that is not its own host: about 0.5 GiB for the first two, and 0.5 GiB for each of two communicators.
CONTEXT_BYTES = 3 * 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One computing device.

    Attributes:
        flops_per_s: dense peak by precision (`fp64`, `fp32`, `bf16`, `fp16`, and `fp8` of single products); a
            missing precision is not supported.
        memory_bytes, memory_bytes_per_s: capacity and peak bandwidth of the device's own memory.
        launch_s: host time to launch one kernel.
        synchronous: the host thread itself computes (a CPU), so it posts nothing while a kernel runs.
        host_bytes_per_s: peak bandwidth to host memory in one direction; None: as the catalogue says.
        price_per_hour: in the user's currency; None until the user gives one.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    launch_s: float = 5e-6
    synchronous: bool = False
    host_bytes_per_s: float | None = None
    price_per_hour: float | None = None

    __repr__ = one_line

    @property
    def usable_bytes(self) -> int:
        """Bytes that a program can allocate."""
        return self.memory_bytes - (0 if self.synchronous else CONTEXT_BYTES)
