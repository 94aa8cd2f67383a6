"""Measured times of every instruction, in slots that survive the process.

Each rank owns one file, `RUN_DIR/slots/rank-N.slots` (`weft.run.record.slots`), mapped into memory. One
thread writes a record, so no lock is needed. The pages belong to the file, so the kernel keeps them when the
process is killed.

This module imports no torch: the launcher merges these files.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.errors import RunError
from weft.program.checks.messages import collective_codes
from weft.program.kinds import is_collective, message_kinds
from weft.program.program import NONE, Program
from weft.program.rank_program import RankProgram
from weft.run.record.clocks import read_clocks
from weft.run.record.slots import (
    HEADER,
    HEADER_BYTES,
    ISSUED_OFFSET,
    MAGIC,
    NO_MORE_BEATS,
    PULSE_OFFSET,
    RECORD,
    VERSION,
    Slots,
    read_slots,
    slots_path,
)
from weft.timeline.timeline import Timeline

CLOCK = "monotonic"
SLOT_FILE_BYTES = 64 * 2**20


class Recorder:
    """Writes one rank's slots; `record` may be called from several threads. Close the runtime first.

    `steps` is the number of the run's remaining steps. If their records do not fit into `SLOT_FILE_BYTES`,
    the ring keeps the last ones.

    Raises:
        RunError: when the disk has no room for the file.
    """

    def __init__(self, run_dir: Path, *, program: RankProgram, plan_id: str, steps: int) -> None:
        self.path = slots_path(run_dir, program.rank)
        self._first, self._rows = program.first_row, len(program)
        step_bytes = max(1, self._rows) * RECORD.size
        self._capacity = max(1, min(steps, SLOT_FILE_BYTES // step_bytes))
        header = HEADER.pack(
            MAGIC,
            VERSION,
            program.rank,
            self._first,
            self._rows,
            self._capacity,
            plan_id.encode("ascii"),
            time.monotonic_ns(),
            time.time_ns(),
        )
        self._map = _mapped_file(self.path, header, HEADER_BYTES + self._capacity * step_bytes)
        self._issued = memoryview(self._map)[ISSUED_OFFSET : ISSUED_OFFSET + 16].cast("q")
        self._beats = self._steps_begun = self._clock_error_ns = 0

    def begin(self, step: int) -> None:
        """Note that the step has begun."""
        self._steps_begun += 1
        struct.pack_into("<qq", self._map, PULSE_OFFSET + 8, self._steps_begun, step)

    def issue(self, position: int, issued_ns: int) -> None:
        """Note that the host issues an instruction now; the times of its work come when it has ended."""
        # An instruction takes a few microseconds, and to pack numbers would be one of them.
        issued = self._issued
        issued[0] = position + 1
        issued[1] = issued_ns

    def beat(self, clock_error_ns: int = 0) -> None:
        """Note that the process runs, and the bound of the error of a device's times."""
        self._beats += 1
        self._clock_error_ns = max(self._clock_error_ns, clock_error_ns)
        struct.pack_into("<q", self._map, PULSE_OFFSET, self._beats)
        struct.pack_into("<q", self._map, PULSE_OFFSET + 24, self._clock_error_ns)

    def rest(self) -> None:
        """Note that no more beats come."""
        struct.pack_into("<q", self._map, PULSE_OFFSET, NO_MORE_BEATS)

    def record(self, step: int, position: int, posted_ns: int, start_ns: int, end_ns: int) -> None:
        """Keep the times (`time.monotonic_ns`) of the instruction at row `position` of the whole Program.

        Calls come in any order, and may come after the step: an end counts when a thread notices it.
        """
        row = step % self._capacity * self._rows + position - self._first
        RECORD.pack_into(
            self._map, HEADER_BYTES + row * RECORD.size, step, position, posted_ns, start_ns, end_ns, step + 1
        )

    def close(self) -> None:
        self._issued.release()
        self._map.close()


def collect_timeline(
    run_dir: Path,
    program: Program,
    plan_id: str,
    run: str,
    *,
    former_ids: Collection[str] = (),
    steps: Collection[int] | None = None,
) -> Timeline:
    """Merge the slots of all ranks into one Timeline.

    `former_ids` are the ids under which earlier versions of weft recorded the same plan. With `steps`, only
    the records of these steps are read.

    Ranks of one node share the monotonic clock; those of others are mapped to rank 0's. A message begins when
    both ends are ready, and a collective when its last member is. So the start of a receive or a collective
    moves to that time; `posted_ns` keeps the time at which the rank itself was ready. Steps that any rank's
    ring has begun to overwrite are left out. The last step may be incomplete if the run was killed.

    Raises:
        RunError: when a file is missing or broken, belongs to another plan, or nothing was recorded.
    """
    slots = [read_slots(slots_path(run_dir, rank), steps) for rank in range(program.ranks)]
    for rank, found in enumerate(slots):
        _require_same_program(slots_path(run_dir, rank), found, program, (plan_id, *former_ids), rank)
    clocks = read_clocks(run_dir)
    records = np.concatenate([clocks.on_first(rank, found.records) for rank, found in enumerate(slots)])
    if not len(records):
        raise RunError(f"{Path(run_dir) / 'slots'}: no rank has recorded an instruction yet")
    oldest = int(records["step"].max()) - min(found.capacity_steps for found in slots) + 1
    records = records[records["step"] >= oldest]
    position = records["position"].astype(np.int64)
    order = np.lexsort((position, records["step"]))
    records, position = records[order], position[order]
    start_ns = _meeting_times(program, records, position)
    origin = int(records["posted_ns"].min())
    return Timeline.of(
        program,
        position,
        run=run,
        plan_id=plan_id,
        clock=CLOCK,
        step=records["step"].astype(np.int64),
        posted_ns=records["posted_ns"] - origin,
        start_ns=start_ns - origin,
        end_ns=records["end_ns"] - origin,
        clock_error_ns=max(found.clock_error_ns for found in slots) + clocks.error_ns,
    )


def _meeting_times(
    program: Program, records: npt.NDArray[np.void], position: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the start of every record, not before the other ends of its message or collective were ready."""
    start_ns = records["start_ns"].astype(np.int64)
    columns, step = program.columns, records["step"].astype(np.int64)
    edges = program.edges
    messages = np.isin(columns.kind, [kind for pair in message_kinds() for kind in pair])
    message = messages[edges.source] & messages[edges.target]
    sender = np.full(len(program), NONE, dtype=np.int64)
    sender[edges.target[message]] = edges.source[message]
    rows = np.arange(len(program))
    meeting = np.where(sender != NONE, sender, rows)
    collective = np.flatnonzero(is_collective(columns.kind))
    # All members of a collective meet at the first one's row.
    key = collective_codes(program, collective)
    _, first, members = np.unique(key, return_index=True, return_inverse=True)
    meeting[collective] = collective[first][members]
    ready_ns = np.full((int(step.max()) + 1 - int(step.min()), len(program)), np.iinfo(np.int64).min)
    turn = step - int(step.min())
    is_receive = sender[position] != NONE
    np.maximum.at(ready_ns, (turn[~is_receive], meeting[position[~is_receive]]), start_ns[~is_receive])
    end_ns = records["end_ns"].astype(np.int64)
    met_ns: npt.NDArray[np.int64] = np.minimum(
        np.maximum(start_ns, ready_ns[turn, meeting[position]]), end_ns
    )
    return met_ns


def _require_same_program(
    path: Path, slots: Slots, program: Program, plan_ids: Sequence[str], rank: int
) -> None:
    first, end = (int(row) for row in program.rank_starts[rank : rank + 2])
    if slots.plan_id not in plan_ids:
        raise RunError(f"{path}: recorded for plan {slots.plan_id}, not for {plan_ids[0]}")
    if (slots.rank, slots.first_position, slots.rows) != (rank, first, end - first):
        found = f"rank {slots.rank} with {slots.rows} rows from row {slots.first_position}"
        expected = f"rank {rank} with {end - first} rows from row {first}"
        raise RunError(f"{path}: recorded for another program: {found}, expected {expected}")


def _mapped_file(path: Path, header: bytes, size: int) -> mmap.mmap:
    # Rename a new file to this name: a reader of the previous run's slots keeps its open file.
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        # A sparse file would end the process with SIGBUS, in the middle of a step, when the disk is full.
        os.posix_fallocate(descriptor, 0, size)
        os.write(descriptor, header)
        mapped = mmap.mmap(descriptor, size)
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"{path}: cannot make room for {size} bytes of records: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return mapped
