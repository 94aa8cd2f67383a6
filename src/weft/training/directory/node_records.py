"""The records of nodes: their clocks, and what rank 0's directory lacks of their measured times and logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.run.launch.nodes import JobNodes
from weft.run.record.clocks import NodeClocks, forget_clocks, write_clocks
from weft.run.record.slots import slots_path
from weft.training.checkpoint.file_copies import Copy, copy_files
from weft.training.coordination.agreement import gather, together
from weft.training.coordination.attendance import Attendance
from weft.training.coordination.node_clocks import compare_clocks, joined

_LOGS = "logs"


@contextmanager
def keeping_records(run_dir: Path, nodes: JobNodes) -> Iterator[None]:
    """Compare the clocks of nodes before and after the block, and bring their records together.

    Every rank enters the block. After an error, records stay on their nodes.

    Raises:
        RunError: on every rank, if a file cannot be copied.
    """
    if len(nodes.nodes) == 1:
        if nodes.rank == 0:
            forget_clocks(run_dir)
        yield
        return
    clocks = compare_clocks(nodes)
    _write(run_dir, nodes, clocks)
    yield
    _write(run_dir, nodes, joined(clocks, compare_clocks(nodes)))
    if nodes.are_apart:
        _collect(run_dir, nodes)


def _write(run_dir: Path, nodes: JobNodes, clocks: NodeClocks) -> None:
    with together():
        if nodes.rank == 0:
            write_clocks(run_dir, clocks)


def _collect(run_dir: Path, nodes: JobNodes) -> None:
    ranks = Attendance()
    with together(ranks.group):
        names = _records(run_dir, nodes) if nodes.leads_folder and nodes.rank else []
    copies = [Copy(name, rank, 0) for rank, held in enumerate(gather(names, ranks.group)) for name in held]
    copy_files(run_dir, copies, nodes.rank, ranks.group)
    ranks.close()


def _records(run_dir: Path, nodes: JobNodes) -> list[str]:
    """Return the files that the ranks of a directory have recorded, relative to it."""
    slots = (slots_path(run_dir, rank) for rank in nodes.folder)
    logs = sorted((run_dir / _LOGS).glob("*")) if (run_dir / _LOGS).is_dir() else []
    return [str(one.relative_to(run_dir)) for one in (*slots, *logs) if one.is_file()]
