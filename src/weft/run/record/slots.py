"""Files of slots, with the measured times of a rank's instructions: their format and their readers.

A file is a header and a ring of fixed-size records. A record belongs to one (step, instruction). The page of
the header also holds the rank's pulse. It shows a launcher whether the process runs, and its current step.

This module imports no torch: the launcher reads these files.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from weft.errors import RunError

HEADER_BYTES = 4096

MAGIC = b"weftslot"
VERSION = 1
HEADER = struct.Struct("<8sIIQQQ16sqq")
# Beats, the number of steps the rank has begun, the last of them, and the largest error of a device's times.
# Then one more than the position of the instruction that the host issued last (0 for none), and when.
PULSE = struct.Struct("<qqqqqq")
PULSE_OFFSET = 1024
ISSUED_OFFSET = PULSE_OFFSET + 32
NO_MORE_BEATS = -1
# `complete` comes last and holds step + 1. If a writer dies half way, over an older record or over zeros,
# `complete` does not match the record's step.
RECORD = struct.Struct("<iiqqqq")
RECORD_TYPE = np.dtype(
    [
        ("step", "<i4"),
        ("position", "<i4"),
        ("posted_ns", "<i8"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("complete", "<i8"),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The records of one rank.

    Attributes:
        first_position, rows: the rank's rows in the Program.
        capacity_steps: the number of steps that the ring holds before it overwrites the oldest.
        monotonic_ns, realtime_ns: both clocks, read together when the file was made.
        clock_error_ns: bounds the error of the records' times; 0 if no device gave them.
        records: the complete records, in no order; times in nanoseconds of `time.monotonic_ns`.
    """

    rank: int
    plan_id: str
    first_position: int
    rows: int
    capacity_steps: int
    monotonic_ns: int
    realtime_ns: int
    clock_error_ns: int
    records: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """The progress of a rank.

    Attributes:
        beats: rises while the process runs; None after the last beat.
        steps_begun: since the rank was started. step: the last begun step; undefined before the first.
        issued: the position in the Program of the instruction that the host issued last; None before the
            first. issued_ns: when, in nanoseconds of `time.monotonic_ns`.
    """

    beats: int | None
    steps_begun: int
    step: int
    issued: int | None = None
    issued_ns: int = 0


def slots_path(run_dir: Path, rank: int) -> Path:
    return Path(run_dir) / "slots" / f"rank-{rank}.slots"


def read_slots(path: Path, steps: Collection[int] | None = None) -> Slots:
    """Read a slot file, also while its rank runs and after it was killed.

    Args:
        steps: read the records of these steps only; as many bytes are read as they have.

    Raises:
        RunError: when the file is missing, cut short or not a slot file.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
            rank, first, rows, capacity, plan_id, monotonic_ns, realtime_ns = _read_header(path, header)
            size, expected = os.fstat(file.fileno()).st_size, HEADER_BYTES + rows * capacity * RECORD.size
            if size < expected:
                raise RunError(f"{path}: cut short: {size} of {expected} bytes")
            if steps is None:
                content = file.read(expected - HEADER_BYTES)
            else:
                content = b"".join(
                    _read_turn(file, turn, rows) for turn in sorted({step % capacity for step in steps})
                )
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    records = np.frombuffer(content, RECORD_TYPE)
    if steps is not None:
        records = records[np.isin(records["step"], list(steps))]
    inside = (records["position"] >= first) & (records["position"] < first + rows)
    return Slots(
        rank=rank,
        plan_id=plan_id.rstrip(b"\0").decode("ascii", errors="replace"),
        first_position=first,
        rows=rows,
        capacity_steps=capacity,
        monotonic_ns=monotonic_ns,
        realtime_ns=realtime_ns,
        clock_error_ns=PULSE.unpack_from(header, PULSE_OFFSET)[3],
        records=records[inside & (records["complete"] == records["step"].astype(np.int64) + 1)],
    )


def read_pulse(path: Path) -> Pulse | None:
    """Return a rank's pulse, while it runs or later; None if it has no whole header."""
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
    except FileNotFoundError:
        return None
    if len(header) < HEADER_BYTES:
        return None
    beats, steps_begun, step, _, issued, issued_ns = PULSE.unpack_from(header, PULSE_OFFSET)
    return Pulse(
        beats=None if beats == NO_MORE_BEATS else beats,
        steps_begun=steps_begun,
        step=step,
        issued=issued - 1 if issued else None,
        issued_ns=issued_ns,
    )


def read_ended(path: Path, step: int) -> npt.NDArray[np.bool_]:
    """Return a mask (rows,) of a rank's instructions: True if ended in this step; the rank may run.

    Raises:
        RunError: when the file is missing or not a slot file.
    """
    # Records of a later step have overwritten this one: it has ended, too.
    return _records_of(path, step)["complete"] > step


def read_last_ended(path: Path, step: int) -> int | None:
    """Return the position of the instruction of this step that ended last; None if none has.

    Raises:
        RunError: as `read_ended`.
    """
    records = _records_of(path, step)
    ended = records[records["complete"] == step + 1]
    return int(ended["position"][ended["end_ns"].argmax()]) if len(ended) else None


def _records_of(path: Path, step: int) -> npt.NDArray[np.void]:
    """Return the records (rows,) at the place of a step in the ring."""
    try:
        with open(path, "rb") as file:
            _, _, rows, capacity, *_ = _read_header(path, file.read(HEADER_BYTES))
            return np.frombuffer(_read_turn(file, step % capacity, rows), RECORD_TYPE)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None


def _read_turn(file: BinaryIO, turn: int, rows: int) -> bytes:
    """Return the records at one place of the ring, which holds one step at a time."""
    file.seek(HEADER_BYTES + turn * rows * RECORD.size)
    return file.read(rows * RECORD.size)


def _read_header(path: Path, content: bytes) -> tuple[int, int, int, int, bytes, int, int]:
    if len(content) < HEADER_BYTES:
        raise RunError(f"{path}: not a slot file: {len(content)} bytes, a header alone has {HEADER_BYTES}")
    magic, version, *told = HEADER.unpack_from(content)
    if magic != MAGIC:
        raise RunError(f"{path}: not a slot file: it does not begin with {MAGIC.decode()!r}")
    if version != VERSION:
        raise RunError(f"{path}: version {version} of the slot file is not {VERSION}")
    rank, first, rows, capacity, plan_id, monotonic_ns, realtime_ns = told
    return rank, first, rows, capacity, plan_id, monotonic_ns, realtime_ns
