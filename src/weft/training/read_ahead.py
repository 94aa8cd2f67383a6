"""`read_ahead`: the reader of a program's batches on a rank; each micro-batch is read once per node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weft.program.rank_program import RankProgram
from weft.run.runtime import TIMEOUT_S
from weft.training.data.node_reads import NodeReads, open_node_reads
from weft.training.data.reader import BatchReader, Read, micro_batches_read
from weft.training.open_run import OpenRun
from weft.training.tasks import hands_over


@contextmanager
def read_ahead(
    run: OpenRun,
    program: RankProgram,
    read: Read,
    steps: range,
    *,
    runs: Callable[[int, int], bool] = lambda step, number: True,
) -> Iterator[tuple[BatchReader, NodeReads]]:
    """Yield the reader of a program's steps, and its reads; every rank enters the block.

    Args:
        runs: as in `BatchReader`.

    Raises:
        PeerLostError, RunError: as `open_node_reads`.
    """
    numbers = micro_batches_read(program, run.runtime.reading_stages)
    reads = open_node_reads(
        read,
        numbers,
        run.nodes,
        hands_over=hands_over(run.job.run.task.kind, run.task),
        timeout_s=TIMEOUT_S,
    )
    # A read may wait for another rank, so the reads end first.
    with BatchReader(reads, numbers, steps, runs) as reader, reads:
        yield reader, reads
