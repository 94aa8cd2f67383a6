"""`Attendance`: how the ranks of a job wait for each other so that one that does not come is named.

A collective cannot say whom it waits for, and how long one takes says little: a rank may have far more to
read than another. So while a rank works towards a meeting it notes in the job's store that it gets on, and
those that are there already look at these notes. One whose note has not changed for a time limit is late. The
first to find that out writes it into the store, so that every rank, the late one too if it comes after all,
fails with the same line.

They meet in a barrier of torch, whose connections tell at once when a rank is gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from weft.errors import RunError
from weft.training.coordination.agreement import meeting_peers

# Nobody works so long towards one meeting, however steadily.
GROUP_TIMEOUT_S = 4 * 3600.0
# A rank notes no more often that it gets on, and looks at the notes so often within a time limit.
NOTE_INTERVAL_S = 0.25
LOOKS_PER_LIMIT = 20
LONGEST_PAUSE_S = 0.05
_VERDICT = "late"


class LateRankError(RunError):
    """A rank did not come to a meeting; raised with the same text on every rank."""


class Attendance:
    """All ranks of the job, for one purpose at a time; every rank makes one, and meets in the same order.

    Attributes:
        group: gloo, for the same purpose.
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
        """Give the process group back; every rank calls it."""
        dist.destroy_process_group(self.group)

    def progress(self) -> None:
        """Note that this rank gets on; it may be called at any rate."""
        if not self._alone and time.monotonic() - self._noted_s >= NOTE_INTERVAL_S:
            self._note()

    def meet(self, where: str, idle: str, limit_s: float) -> None:
        """Wait until every rank has come; every rank calls it.

        Args:
            where: begins the line of the error, such as a path.
            idle: what a late rank did, such as "read nothing".
            limit_s: how long a rank may note nothing while another one waits.

        Raises:
            LateRankError: when a rank is late, on every rank.
            PeerLostError: when one is gone.
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
                # Pauses are counted, and not the clock asked, which goes on while a whole job is suspended.
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
                    self._declare(f"{where}: {_named(late)} {idle} for {limit_s:g} s while others waited")
                former, look_s = notes, 0.0
            work.wait()

    def require_nobody_late(self) -> None:
        """Fail like the others when a rank has been found to be late; does not wait.

        Raises:
            LateRankError: naming the ranks.
        """
        if not self._alone:
            with meeting_peers():
                verdict = self._store.get(_VERDICT).decode()
            if verdict:
                raise LateRankError(verdict)

    def _declare(self, text: str) -> None:
        raise LateRankError(self._store.compare_set(_VERDICT, "", text).decode())

    def _note(self) -> None:
        self._notes += 1
        with meeting_peers():
            self._store.set(_key(self._rank), f"{self._meetings} {self._notes}")
        self._noted_s = time.monotonic()

    def _read_notes(self) -> list[tuple[int, int]]:
        """(meetings that it has come to, notes that it has made) of every rank."""
        texts = self._store.multi_get([_key(rank) for rank in range(self._ranks)])
        return [(int(meetings), int(notes)) for meetings, notes in (text.split() for text in texts)]


def _key(rank: int) -> str:
    return f"rank {rank}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
