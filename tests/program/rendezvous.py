"""An executor that runs a program by the letter, as an oracle for what waits for what.

Hosts are synchronous: they post rows in order and wait inside a computation. Queues are first in, first
out. A send and its receive end together, and so do the members of a collective.
"""

from __future__ import annotations

from collections.abc import Collection

from weft.program.kinds import KINDS, MESSAGES
from weft.program.program import Program


def stuck_rows(program: Program, *, never: Collection[int] = (), eager: bool = False) -> set[int]:
    """Rows that never end when one cycle of `program` is executed, and those of `never` do not end.

    `eager`: a send ends by itself, before its receive.
    """
    rows = range(len(program))
    kind = [KINDS[code] for code in program.columns.kind.tolist()]
    together = ended_together(program, eager=eager)
    before: list[set[int]] = [set() for _ in rows]
    for source, target, distance in zip(
        program.edges.source.tolist(),
        program.edges.target.tolist(),
        program.edges.distance.tolist(),
        strict=True,
    ):
        if distance == 0 and together[source] is not together[target]:
            before[target].add(source)
    queues = program.queue.tolist()
    last_of_queue: dict[int, int] = {}
    computing: dict[int, int] = {}
    for row, rank in enumerate(program.columns.rank.tolist()):
        if queues[row] in last_of_queue:
            before[row].add(last_of_queue[queues[row]])
        last_of_queue[queues[row]] = row
        if rank in computing:
            before[row].add(computing[rank])
        if kind[row].stream == "compute":
            computing[rank] = row
    left = set(rows)
    progress = True
    while progress:
        ready = {row for row in left if not before[row] & left}
        ended = {row for row in ready if together[row] <= ready and not together[row] & set(never)}
        left -= ended
        progress = bool(ended)
    return left


def ended_together(program: Program, *, eager: bool = False) -> list[frozenset[int]]:
    """With which rows each row ends: the other end of its message, the members of its collective."""
    columns = program.columns
    calls: dict[object, set[int]] = {}
    sends = dict(MESSAGES)
    for row in range(len(program)):
        kind, rank, peer = int(columns.kind[row]), int(columns.rank[row]), int(columns.peer[row])
        stage, part, micro_batch = (
            int(columns.stage[row]),
            int(columns.part[row]),
            int(columns.micro_batch[row]),
        )
        key: object = row
        if eager and kind in {*sends, *sends.values()}:
            pass
        elif kind in sends:
            key = (sends[kind], rank, peer, stage, part, micro_batch)
        elif kind in sends.values():
            key = (kind, peer, rank, part, stage, micro_batch)
        elif KINDS[kind].collective:
            key = ("collective", kind, stage, part, int(columns.group[row]))
        calls.setdefault(key, set()).add(row)
    sets: list[frozenset[int]] = [frozenset()] * len(program)
    for members in calls.values():
        shared = frozenset(members)
        for row in members:
            sets[row] = shared
    return sets
