"""The link between a device and the memory of its host: bandwidth of data sheets, and what copies reach."""

from __future__ import annotations

from weft.describe.catalogue import catalogue
from weft.describe.device import Device
from weft.errors import InputError, Violation

# nvbandwidth measures 24.8 GB/s of the 32 GB/s of PCI Express 4 x16 (A100 SXM, pinned memory, one direction).
EFFICIENCY = 0.78
# Relative half-width of the 90 % interval: hosts differ, and some reach less in both directions at once.
SPREAD = 0.25
# Start of one asynchronous copy.
LATENCY_S = 10e-6
SOURCE = "host links of data sheets"


def host_copy_s(device: Device, moved_bytes: int) -> float:
    """Return the seconds of a copy between a device and pinned memory of its host.

    Raises:
        InputError: for a device outside the catalogue that does not say its `host_bandwidth`.
    """
    return LATENCY_S + moved_bytes / (EFFICIENCY * _peak_bytes_per_s(device))


def _peak_bytes_per_s(device: Device) -> float:
    if device.host_bytes_per_s is not None:
        return device.host_bytes_per_s
    if device.synchronous:
        # The device is its own host: a copy reads and writes each byte.
        return device.memory_bytes_per_s / 2
    entry = catalogue().get(device.name)
    if entry is None:
        raise InputError(Violation(f"device.{device.name}.host_bandwidth", "missing", "32 GB/s"))
    return entry.host_bytes_per_s
