"""Times in which a device encodes values in few bits, and decodes them: measured, or by its memory."""

from __future__ import annotations

from weft.describe.device import Device
from weft.predict.profile import MachineMeasurement, value_at

# Bytes that a copy reads and writes for an fp32 value.
_COPIED_BYTES = 8.0
# Where nothing is measured: values encoded and decoded for each value of a copy. One core of a CPU has these
# (`benchmarks/sync_codecs.py`); those of accelerators are the target of their kernels.
_ENCODED, _DECODED = 0.8, 0.8
_ENCODED_BY_CPU, _DECODED_BY_CPU = 0.29, 1.7


def codec_s(device: Device, machine: MachineMeasurement | None, encoded: float, decoded: float) -> float:
    """Return the seconds of a device for so many encoded and decoded fp32 values.

    `machine` has the measurements of this device, if there are any.
    """
    if machine is not None and machine.encode and machine.decode:
        return _measured_s(machine.encode, encoded) + _measured_s(machine.decode, decoded)
    encode, decode = (_ENCODED_BY_CPU, _DECODED_BY_CPU) if device.synchronous else (_ENCODED, _DECODED)
    return _COPIED_BYTES * (encoded / encode + decoded / decode) / device.memory_bytes_per_s


def _measured_s(table: tuple[tuple[float, float], ...], values: float) -> float:
    return value_at(table, values) if values else 0.0
