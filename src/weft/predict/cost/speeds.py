"""How fast one device runs one kernel, from its data sheet or from measurements of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weft.describe.device import Device
from weft.errors import InputError, Violation
from weft.predict.cost.tables import seconds_of_speeds, value_at
from weft.predict.profile import MachineMeasurement

# Shares of the data-sheet peaks that large kernels reach, and the time that every kernel needs to start and
# end, in host launches: a kernel of x flops reaches MATMUL_SHARE * x / (x + x_half), where x_half is what a
# large kernel does in the start-up time. Fitted to the eight training runs on A100 of tables 3 and 5 of
# Korthikanti et al., arXiv 2205.05198; tests/predict/cost/test_korthikanti.py keeps the residuals.
MATMUL_SHARE = 0.82
MEMORY_SHARE = 0.60
START_UP_LAUNCHES = 1.0


class Speeds(Protocol):
    """Seconds of one kernel on an idle device, its launch by the host excluded."""

    @property
    def launch_s(self) -> float: ...

    def matmul_s(self, flops: float, precision: str) -> float: ...

    def memory_s(self, moved_bytes: float) -> float: ...


@dataclass(frozen=True, slots=True)
class DataSheetSpeeds:
    """Peaks of the data sheet times the efficiency of a kernel of that size."""

    device: Device

    @property
    def launch_s(self) -> float:
        return self.device.launch_s

    def matmul_s(self, flops: float, precision: str) -> float:
        """Raises InputError where the device does not have the precision."""
        peak = self.device.flops_per_s.get(precision)
        if peak is None:
            has = ", ".join(sorted(self.device.flops_per_s))
            raise InputError(
                Violation("precision", f"{precision!r} is not supported by {self.device.name}; it has {has}")
            )
        return flops / (peak * MATMUL_SHARE) + self._start_up_s

    def memory_s(self, moved_bytes: float) -> float:
        return moved_bytes / (self.device.memory_bytes_per_s * MEMORY_SHARE) + self._start_up_s

    @property
    def _start_up_s(self) -> float:
        # The processor of a synchronous device is its own host: it has nothing to start up.
        return 0.0 if self.device.synchronous else START_UP_LAUNCHES * self.device.launch_s


class MeasuredSpeeds:
    """Tables measured kernel by kernel; each of their times contains one launch, which is taken out."""

    def __init__(self, machine: MachineMeasurement) -> None:
        self.launch_s = machine.launch_s
        self._matmul = {name: seconds_of_speeds(table) for name, table in machine.matmul.items()}
        self._memory = seconds_of_speeds(machine.memory)

    def matmul_s(self, flops: float, precision: str) -> float:
        return max(0.0, value_at(self._matmul[precision], flops) - self.launch_s)

    def memory_s(self, moved_bytes: float) -> float:
        return max(0.0, value_at(self._memory, moved_bytes) - self.launch_s)
