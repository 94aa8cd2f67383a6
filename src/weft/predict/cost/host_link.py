"""The link between a device and the memory of its host: bandwidth of data sheets, and what copies reach.

Messages and sums of the transport `host` take it at both ends. Inside a node they then go over TCP of the
loopback device. On a busy Xeon with 2 cores, 1 MiB moved at 6.6 GB/s (2026-11-29). 64 MiB moved at 1.2
GB/s. No host with GPUs was measured.
"""

from __future__ import annotations

from weft.describe.catalogue import catalogue
from weft.describe.cluster import Link
from weft.describe.device import Device
from weft.describe.job import Job
from weft.describe.units import format_bytes, format_seconds
from weft.errors import InputError, Violation

# nvbandwidth measures 24.8 GB/s of the 32 GB/s of PCI Express 4 x16 (A100 SXM, pinned memory, one direction).
EFFICIENCY = 0.78
# Relative half-width of the 90 % interval: hosts differ, and some reach less in both directions at once.
SPREAD = 0.25
# Start of one asynchronous copy.
LATENCY_S = 10e-6
SOURCE = "host links of data sheets"
# Between ranks of one node through host memory, and half the width of the interval of all such transfers.
LOOPBACK = Link(bytes_per_s=2e9, latency_s=30e-6)
TRANSFER_SPREAD = 0.5


def host_copy_s(device: Device, moved_bytes: float) -> float:
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


def goes_through_host(job: Job) -> bool:
    """Return True if some devices of a job copy messages and sums through the memory of their hosts."""
    return job.transport == "host" and any(not group.device.synchronous for group in job.cluster.groups)


def assumed_through_host(job: Job) -> str | None:
    """Return what is assumed of transfers through host memory, in words; None if a job has none."""
    if not goes_through_host(job):
        return None
    inside = any(group.devices > 1 and not group.device.synchronous for group in job.cluster.groups)
    rate = f"{format_bytes(LOOPBACK.bytes_per_s)}/s and {format_seconds(LOOPBACK.latency_s)}"
    words = f"messages and sums go through host memory: copies at {EFFICIENCY:.0%} of {SOURCE}"
    return f"{words}, TCP inside nodes at {rate}" if inside else words
