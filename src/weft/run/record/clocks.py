"""Clocks of nodes: how far each is from rank 0's, in the records of a run.

Each node has a monotonic clock of its own, with another zero. The nodes compare them as a run starts and as
it ends. Times between two comparisons are mapped to rank 0's clock by a line, so a steady drift does not
count. `RUN_DIR/slots/clocks.json` has the comparisons, by the first rank of each node.

This module imports no torch: the launcher reads the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.errors import RunError
from weft.files import write_whole
from weft.program.arrays import Ints
from weft.run.record.slots import slots_path

_TIMES = ("posted_ns", "start_ns", "end_ns")


class ClockComparison(NamedTuple):
    """A comparison of a node's clock with rank 0's.

    Attributes:
        own_ns: the node's clock. offset_ns: rank 0's clock minus it. error_ns: bounds the offset's error.
    """

    own_ns: int
    offset_ns: int
    error_ns: int


class NodeClocks(NamedTuple):
    """The comparisons of every node with rank 0's, by its first rank; each in their order."""

    comparisons: Mapping[int, Sequence[ClockComparison]]

    @property
    def error_ns(self) -> int:
        """The bound of the error of the offsets; rank 0's own node has none."""
        return max((one.error_ns for each in self.comparisons.values() for one in each), default=0)

    def on_first(self, rank: int, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Return a rank's records with times of rank 0's clock."""
        compared = self._of(rank)
        if not compared:
            return records
        own = np.array([one.own_ns for one in compared], dtype=np.int64)
        offset = np.array([one.offset_ns for one in compared], dtype=np.int64)
        mapped = records.copy()
        for name in _TIMES:
            mapped[name] += _between(own, offset, records[name].astype(np.int64))
        return mapped

    def _of(self, rank: int) -> Sequence[ClockComparison]:
        """Return the comparisons of a rank's node: its first rank is the last one up to the rank."""
        leader = max((one for one in self.comparisons if one <= rank), default=None)
        return () if leader is None else self.comparisons[leader]


def _between(own: Ints, offset: Ints, at: Ints) -> Ints:
    """Return offsets at these times of the own clock, on the line between comparisons."""
    # Nanoseconds since a machine's start have more digits than a float.
    moved: Ints = np.interp(at - own[0], own - own[0], offset - offset[0]).round().astype(np.int64)
    offsets: Ints = offset[0] + moved
    return offsets


def write_clocks(run_dir: Path, clocks: NodeClocks) -> None:
    path = _path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({str(rank): each for rank, each in clocks.comparisons.items()}) + "\n")


def forget_clocks(run_dir: Path) -> None:
    """Remove the clocks of a former start; a run on one node has none."""
    _path(run_dir).unlink(missing_ok=True)


def read_clocks(run_dir: Path) -> NodeClocks:
    """Return the clocks of a run.

    Raises:
        RunError: if the file is broken.
    """
    path = _path(run_dir)
    if not path.exists():
        return NodeClocks({})
    try:
        record = json.loads(path.read_text())
        found = {
            int(rank): [ClockComparison(*map(int, one)) for one in each] for rank, each in record.items()
        }
    except (ValueError, TypeError, AttributeError):
        raise RunError(f"{path}: broken; remove it to merge the records without it") from None
    return NodeClocks(found)


def _path(run_dir: Path) -> Path:
    return slots_path(run_dir, 0).with_name("clocks.json")
