"""Times in which a device encodes values in few bits, and decodes them: measured, or by its memory.

Fused kernels read every number once. Plain torch makes the same bits in about a hundred passes. Most of them
go over the 64-bit integers of its random numbers.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.describe.device import Device
from weft.predict.profile import MachineMeasurement, value_at

# Bytes that a copy reads and writes for an fp32 value.
_COPIED_BYTES = 8.0
# Where nothing is measured: values encoded and decoded for each value of a copy. One core of a CPU has these
# (`benchmarks/sync_codecs.py`); those of accelerators are the target of their kernels.
_ENCODED, _DECODED = 0.8, 0.8
_ENCODED_BY_CPU, _DECODED_BY_CPU = 0.29, 1.7
# Bytes that plain torch moves for an encoded and a decoded value, with the transform, in 4 bits.
UNFUSED_BYTES = 854.0, 135.0
# Copies in the time in which a core of a CPU encodes or decodes so (`benchmarks/sync_codecs.py`).
_UNFUSED_COPIES_BY_CPU = 310.0, 43.0

CodecTime = Callable[[Device, MachineMeasurement | None, float, float], float]


def codec_s(device: Device, machine: MachineMeasurement | None, encoded: float, decoded: float) -> float:
    """Return the seconds of a device for so many encoded and decoded fp32 values.

    `machine` has the measurements of this device, if there are any.
    """
    if machine is not None and machine.encode and machine.decode:
        return _measured_s(machine.encode, encoded) + _measured_s(machine.decode, decoded)
    encode, decode = (_ENCODED_BY_CPU, _DECODED_BY_CPU) if device.synchronous else (_ENCODED, _DECODED)
    return _COPIED_BYTES * (encoded / encode + decoded / decode) / device.memory_bytes_per_s


def unfused_codec_s(
    device: Device, machine: MachineMeasurement | None, encoded: float, decoded: float
) -> float:
    """Return the seconds of `codec_s` in plain torch, by the memory of the device."""
    per_value = (
        tuple(_COPIED_BYTES * copies for copies in _UNFUSED_COPIES_BY_CPU)
        if device.synchronous
        else UNFUSED_BYTES
    )
    return (encoded * per_value[0] + decoded * per_value[1]) / device.memory_bytes_per_s


def no_codec_s(device: Device, machine: MachineMeasurement | None, encoded: float, decoded: float) -> float:
    """Return no seconds for any codec, to find the time that codecs add to a step."""
    return 0.0


def _measured_s(table: tuple[tuple[float, float], ...], values: float) -> float:
    return value_at(table, values) if values else 0.0
