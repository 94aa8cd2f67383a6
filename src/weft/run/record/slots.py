"""Files of slots, in which ranks keep the measured times of their instructions: their form and their readers.

A file is a header and a ring of fixed-size records. A record belongs to one (step, instruction). Behind the
header is the rank's pulse, by which a launcher sees whether the process gets to run, and how far it is.

No torch here: the launcher reads these files.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.errors import RunError

HEADER_BYTES = 4096

MAGIC = b"weftslot"
VERSION = 1
HEADER = struct.Struct("<8sIIQQQ16sqq")
# Beats, how many steps the rank has begun, and the last one of them.
PULSE = struct.Struct("<qqq")
PULSE_OFFSET = 1024
NO_MORE_BEATS = -1
# `complete` comes last and holds step + 1: a record whose writer died half way, over an older one or over
# nothing, does not carry the number of its own step.
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
    """What one rank recorded.

    Attributes:
        first_position, rows: the rank's rows in the Program.
        capacity_steps: how many steps the ring holds before it overwrites the oldest.
        monotonic_ns, realtime_ns: both clocks, read together when the file was made.
        records: the complete records, in no order; times in nanoseconds of `time.monotonic_ns`.
    """

    rank: int
    plan_id: str
    first_position: int
    rows: int
    capacity_steps: int
    monotonic_ns: int
    realtime_ns: int
    records: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """How far a rank is.

    Attributes:
        beats: rises while the process gets to run; None when it beats no more.
        steps_begun: since the rank was started. step: the last one, of any value before the first.
    """

    beats: int | None
    steps_begun: int
    step: int


def slots_path(run_dir: Path, rank: int) -> Path:
    return Path(run_dir) / "slots" / f"rank-{rank}.slots"


def read_slots(path: Path) -> Slots:
    """Read a slot file, also while its rank runs and after it was killed.

    Raises:
        RunError: when the file is missing, cut short or not a slot file.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    rank, first, rows, capacity, plan_id, monotonic_ns, realtime_ns = _read_header(path, content)
    expected = HEADER_BYTES + rows * capacity * RECORD.size
    if len(content) < expected:
        raise RunError(f"{path}: cut short: {len(content)} of {expected} bytes")
    records = np.frombuffer(content, RECORD_TYPE, count=rows * capacity, offset=HEADER_BYTES)
    inside = (records["position"] >= first) & (records["position"] < first + rows)
    return Slots(
        rank=rank,
        plan_id=plan_id.rstrip(b"\0").decode("ascii", errors="replace"),
        first_position=first,
        rows=rows,
        capacity_steps=capacity,
        monotonic_ns=monotonic_ns,
        realtime_ns=realtime_ns,
        records=records[inside & (records["complete"] == records["step"].astype(np.int64) + 1)],
    )


def read_pulse(path: Path) -> Pulse | None:
    """Return a rank's pulse, while it runs or later; None where it has no whole slots."""
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
    except FileNotFoundError:
        return None
    if len(header) < HEADER_BYTES:
        return None
    beats, steps_begun, step = PULSE.unpack_from(header, PULSE_OFFSET)
    return Pulse(beats=None if beats == NO_MORE_BEATS else beats, steps_begun=steps_begun, step=step)


def read_ended(path: Path, step: int) -> npt.NDArray[np.bool_]:
    """Which of a rank's instructions of a step have ended, while it runs.

    Raises:
        RunError: when the file is missing or not a slot file.
    """
    try:
        with open(path, "rb") as file:
            _, _, rows, capacity, *_ = _read_header(path, file.read(HEADER_BYTES))
            file.seek(HEADER_BYTES + step % capacity * rows * RECORD.size)
            records = np.frombuffer(file.read(rows * RECORD.size), RECORD_TYPE)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from None
    # What is of a later step has overwritten this one.
    return records["complete"] > step


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
