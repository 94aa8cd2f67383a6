"""`Membership`: one rank of a run that goes on without lost replicas, from roll to roll.

Between resets, replicas differ and may be a step apart. So a member keeps its whole state at each reset. When
another one is killed, all members go back to the last reset that all of them have. They open new groups there
and go on with a verified program of the present replicas. New processes join behind a later reset.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft.describe.run_tables.training import KEPT_STATES
from weft.errors import RunError
from weft.planning.lost_replicas import LEAST, ranks_of_replicas
from weft.planning.planned_job import PlannedJob
from weft.run.launch.failures import PeerLostError
from weft.run.launch.rolls import Replicas, Roll, RollCall
from weft.run.launch.worker_start import START_TIMEOUT_S, WorkerContext
from weft.run.runtime import RankRuntime
from weft.training.checkpoint.kept_state import KeptState
from weft.training.checkpoint.training_state import TrainingState
from weft.training.coordination.agreement import StopSignals, meeting_peers
from weft.training.directory.run_directory import RunDirectory

POLL_S = 0.02
# The agent sees the end of a process within its poll. Other errors than lost peers rarely follow from it.
NOTICE_TIMEOUT_S, OTHER_TIMEOUT_S = 30.0, 5.0
# A member notices a loss in its next collective, so after a step at most.
GATHER_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """The way from one roll to the next.

    Attributes:
        state: the scalars with which the members go on.
        lost, back: the ranks that are gone since the roll before, and those with new processes.
        away_since: of each rank that is gone or back, the step with which its absence began.
        reached: the step that a member had begun last.
    """

    state: TrainingState
    lost: tuple[int, ...]
    back: tuple[int, ...]
    away_since: Mapping[int, int]
    reached: int


class Membership:
    """One rank's membership.

    Args:
        job: with the plan of all replicas.
        context: of the whole run.
        store: the job's store.
        joins: True if this process takes the place of another one.

    Attributes:
        context: its rank is the place in the roll.
        change: the way into this roll; None in the first.
        runtime: that of this roll, which ends with it.
        reached: the step that this rank has begun last.
        signals: those that ask this process to stop, between two rolls, too.
    """

    def __init__(
        self,
        job: PlannedJob,
        directory: RunDirectory,
        context: WorkerContext,
        store: dist.Store,
        *,
        joins: bool,
    ) -> None:
        self.job, self.context = job, context
        self._directory = directory
        self.change: Change | None = None
        self.runtime: RankRuntime | None = None
        self._rank, self._store = context.rank, store
        self._replicas = Replicas(tuple(ranks_of_replicas(job.plan) or ()), LEAST)
        self._call = RollCall(store, context.world_size)
        self.roll = Roll(0, () if joins else tuple(range(context.world_size)))
        self._kept: list[KeptState] = []
        self._away_since: dict[int, int] = {}
        self.reached = 0
        self.signals = StopSignals()

    def begin(self) -> None:
        """Note that this rank takes the roll's steps: from now on it can lose another member."""
        self._call.begin(self.roll, self._rank)

    def keep(self, runtime: RankRuntime, state: TrainingState) -> None:
        """Keep the state of this rank, to which all members can go back."""
        self._kept = [*self._kept[1 - KEPT_STATES :], KeptState.of(runtime, state)]
        for rank in self.roll.members:
            # Whoever is here has come back by now.
            self._away_since.pop(rank, None)

    def others_wait(self) -> bool:
        """Return True if new processes wait to join; rank 0 of the roll asks."""
        return self.context.rank == 0 and bool(self._call.waiting(self._replicas))

    def leave(self) -> None:
        """Leave the roll between two steps, so that new processes can join."""
        if self.context.rank == 0:
            self._call.leave(self.roll)

    def is_followed(self, error: Exception) -> bool:
        """Return True if the error follows from the loss of another member: then there is a later roll."""
        limit_s = NOTICE_TIMEOUT_S if isinstance(error, PeerLostError) else OTHER_TIMEOUT_S
        deadline_s = time.monotonic() + limit_s
        # The agent writes no roll once the run is to stop.
        while not self.signals.received and time.monotonic() < deadline_s:
            if self._call.at(self.roll.number + 1) is not None:
                return True
            time.sleep(POLL_S)
        return False

    def enter(self) -> None:
        """Enter the next roll and open the job's process group anew; all its members call it.

        Raises:
            RunError: if they do not meet in time, or the run is to stop before there is such a roll.
        """
        self.signals.handle()
        if self.runtime is not None:
            # After a loss its work has failed. After a farewell it is closed.
            with suppress(RunError):
                self.runtime.close(failed=True)
            self.runtime = None
        if dist.is_initialized():
            dist.destroy_process_group()
        roll = self._gathered()
        told = dict(zip(roll.members, self._call.told(roll), strict=True))
        self.change = self._change(roll, told)
        self.roll = roll
        place = roll.members.index(self._rank)
        self.context = replace(self.context, rank=place, world_size=len(roll.members))
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"weft roll {roll.number}", self._store),
            rank=place,
            world_size=len(roll.members),
            timeout=timedelta(seconds=START_TIMEOUT_S),
        )

    def restore(self, runtime: RankRuntime) -> TrainingState:
        """Bring the rank to the state with which its roll begins, and take in new processes."""
        change = self.change
        assert change is not None, "a first roll begins otherwise"
        self._kept = [one for one in self._kept if one.state.step <= change.state.step]
        if self._kept:
            self._kept[-1].restore(runtime)
        if change.back:
            with meeting_peers():
                for method in runtime.methods.values():
                    method.take_in(away=not self._kept)
        return change.state

    def _gathered(self) -> Roll:
        """Return the newest roll with this rank, once all its members have come."""
        number = self.roll.number
        if not self.roll.members:
            self._call.wait_in(self._rank)
        own: dict[str, Any] = {
            "states": [asdict(one.state) for one in self._kept],
            "members": self.roll.members,
            "away_since": self._away_since,
            "reached": self.reached,
            "recorded": max((row["step"] + 1 for row in self._directory.metrics()), default=0),
        }
        deadline_s = time.monotonic() + GATHER_TIMEOUT_S
        roll: Roll | None = None
        while True:
            while (later := self._call.at(number + 1)) is not None:
                number, roll = number + 1, later
                if self._rank in roll.members:
                    self._call.tell(roll, self._rank, own)
                elif self.roll.members:
                    # Another rank of this replica was killed: this one comes back with its new process.
                    self._kept, own["states"] = [], []
                    self.roll = Roll(number, ())
                    self._call.wait_in(self._rank)
            if roll is not None and self._rank in roll.members and self._call.all_told(roll):
                # A later one must not come between.
                if self._call.at(number + 1) is None:
                    return roll
                continue
            if self.signals.received and (roll is None or self._rank not in roll.members):
                raise RunError("the run was stopped while its ranks went on without a lost one")
            if self.roll.members and time.monotonic() > deadline_s:
                raise RunError(f"the others did not come within {GATHER_TIMEOUT_S:g} s to go on")
            time.sleep(POLL_S)

    def _change(self, roll: Roll, told: Mapping[int, Mapping[str, Any]]) -> Change:
        """Return what all members conclude from what they have told; new processes have nothing."""
        survivors = {rank: one for rank, one in told.items() if one["states"]}
        steps = [{state["step"] for state in one["states"]} for one in survivors.values()]
        # The members of the last roll train a step at least, which its report needs.
        common = set.intersection(*steps) & set(range(self.job.last_step)) if steps else set()
        # Rank 0 may have died with figures of steps that it had not written.
        recorded = max((one["recorded"] for one in survivors.values()), default=0)
        common = {step for step in common if step <= recorded} or common
        if not common:
            raise RunError("the ranks have no common step from which they could go on")
        first = survivors[min(survivors)]
        state = next(one for one in first["states"] if one["step"] == max(common))
        lost = tuple(sorted(set(first["members"]) - set(roll.members)))
        back = tuple(sorted(set(roll.members) - set(survivors)))
        away_since = {int(rank): step for rank, step in first["away_since"].items()}
        away_since = {**dict.fromkeys(lost, max(common)), **away_since}
        self._away_since = dict(away_since)
        reached = max(one["reached"] for one in survivors.values())
        return Change(
            state=TrainingState(**state), lost=lost, back=back, away_since=away_since, reached=reached
        )


def connect_store() -> dist.Store:
    """Return a connection to the store that the agent hosts."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=START_TIMEOUT_S),
    )
