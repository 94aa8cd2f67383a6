"""`Attendance`: meetings of the ranks of a job, in which a late rank is named.

A collective does not name the rank that it waits for. Its duration says little, because a rank may have far
more to read than another. So a rank on its way to a meeting notes its progress in the job's store. The
waiting ranks read these notes. A rank is late if its note has not changed for a time limit. The first rank
to find this writes it into the store. Then all ranks fail with the same line, also the late rank.

The ranks meet in a barrier of torch; its connections break at once if a rank is gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from weft.errors import RunError
from weft.training.coordination.agreement import meeting_peers

# No rank needs more time for one meeting, even with steady progress.
GROUP_TIMEOUT_S = 4 * 3600.0
# The shortest interval of a rank's notes, and the number of looks at the notes within a time limit.
NOTE_INTERVAL_S = 0.25
LOOKS_PER_LIMIT = 20
LONGEST_PAUSE_S = 0.05
_VERDICT = "late"


class LateRankError(RunError):
    """A rank did not come to a meeting; raised with the same text on every rank."""


class Attendance:
    """All ranks of the job, for one purpose; every rank makes one and calls its meetings in the same order.

    Attributes:
        group: a gloo process group for the same purpose.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S), group_desc="weft attendance"
        )
        self._rank, self._ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._meetings = self._notes = 0
        self._noted_s = float("-inf")
        self._store = self.group.get_group_store()
        self._alone = self._ranks == 1
        if not self._alone:
            if self._rank == 0:
                self._store.set(_VERDICT, "")
            self._note()
            with meeting_peers():  # every note can be read from now on
                dist.barrier(group=self.group)

    def close(self) -> None:
        """Free the process group; every rank calls it."""
        dist.destroy_process_group(self.group)

    def progress(self) -> None:
        """Note progress of this rank; call it at any rate."""
        if not self._alone and time.monotonic() - self._noted_s >= NOTE_INTERVAL_S:
            self._note()

    def meet(self, where: str, idle: str, limit_s: float) -> None:
        """Wait until every rank has come; every rank calls it.

        Args:
            where: the beginning of the error's line, such as a path.
            idle: the late rank's omission, such as "read nothing".
            limit_s: the longest time without a note, while another rank waits.

        Raises:
            LateRankError: if a rank is late, on every rank.
            PeerLostError: if a rank is gone.
        """
        if self._alone:
            return
        self._meetings += 1
        self._note()
        self.require_nobody_late()
        with meeting_peers():
            work = dist.barrier(group=self.group, async_op=True)
            former, quiet_s, look_s, pause_s = self._read_notes(), [0.0] * self._ranks, 0.0, 1e-4
            while not work.is_completed():
                # The loop counts pauses: the clock goes on while the whole job is suspended.
                time.sleep(pause_s)
                look_s += pause_s
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                if look_s < limit_s / LOOKS_PER_LIMIT:
                    continue
                self.require_nobody_late()
                notes = self._read_notes()
                for rank, (before, now) in enumerate(zip(former, notes, strict=True)):
                    quiet_s[rank] = quiet_s[rank] + look_s if before == now else 0.0
                late = [
                    rank
                    for rank, (meetings, _) in enumerate(notes)
                    if meetings < self._meetings and quiet_s[rank] >= limit_s
                ]
                if late:
                    problem = f"{where}: {_named(late)} {idle} for {limit_s:g} s while others waited"
                    raise LateRankError(self._store.compare_set(_VERDICT, "", problem).decode())
                former, look_s = notes, 0.0
            work.wait()

    def require_nobody_late(self) -> None:
        """Raise the common error if a rank has been found late; do not wait.

        Raises:
            LateRankError: naming the ranks.
        """
        if not self._alone:
            with meeting_peers():
                verdict = self._store.get(_VERDICT).decode()
            if verdict:
                raise LateRankError(verdict)

    def _note(self) -> None:
        self._notes += 1
        with meeting_peers():
            self._store.set(_key(self._rank), f"{self._meetings} {self._notes}")
        self._noted_s = time.monotonic()

    def _read_notes(self) -> list[tuple[int, int]]:
        """Return (meetings reached, notes made) of every rank."""
        texts = self._store.multi_get([_key(rank) for rank in range(self._ranks)])
        return [(int(meetings), int(notes)) for meetings, notes in (text.split() for text in texts)]


def _key(rank: int) -> str:
    return f"rank {rank}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
