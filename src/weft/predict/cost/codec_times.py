"""Times in which a device encodes values in few bits, and decodes them: measured, or by its memory."""

from __future__ import annotations

from weft.describe.device import Device
from weft.predict.profile import MachineMeasurement, value_at

# Bytes that one pass reads and writes for an fp32 value and its code of 4 bits.
_TOUCHED_BYTES = 4.5
# The part of the memory's bandwidth that kernels reach where nothing is measured: on accelerators, which have
# a kernel for each codec, and on one core of a CPU (`benchmarks/codecs.py`).
_ENCODE_SHARE, _DECODE_SHARE = 0.8, 0.8
_ENCODE_SHARE_OF_CPU, _DECODE_SHARE_OF_CPU = 0.15, 0.5


def codec_s(device: Device, machine: MachineMeasurement | None, encoded: float, decoded: float) -> float:
    """Return the seconds of a device for so many encoded and decoded fp32 values.

    `machine` has the measurements of this device, if there are any.
    """
    if machine is not None and machine.encode and machine.decode:
        return _measured_s(machine.encode, encoded) + _measured_s(machine.decode, decoded)
    encode, decode = (
        (_ENCODE_SHARE_OF_CPU, _DECODE_SHARE_OF_CPU) if device.synchronous else (_ENCODE_SHARE, _DECODE_SHARE)
    )
    return _TOUCHED_BYTES * (encoded / encode + decoded / decode) / device.memory_bytes_per_s


def _measured_s(table: tuple[tuple[float, float], ...], values: float) -> float:
    return value_at(table, values) if values else 0.0
