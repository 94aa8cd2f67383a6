"""The process groups of one runtime: disposable, numbered by generation, kept in no module.

A rank opens the groups that it is in and asks for no other. All ranks open theirs in one order, so that none
waits for itself: one for losses, the groups of the Program by number, those of the tensor and of the context
ranks of each replica.

Torch's `new_group` would have every rank ask for every group. With `use_local_synchronization` it would not,
but names a group after how many groups the rank is in by then, so that ranks in different numbers of groups
never meet, and a group that is made again finds what the former one has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.program.rank_program import RankProgram
from weft.run.transport.host_group import HostGroup

BACKEND = "gloo"


@dataclass(frozen=True, kw_only=True)
class Groups:
    """What one rank communicates over.

    `collective` has the groups of the rank's part of the Program, by their number there. `replica` has those
    of the ranks that divide layers or tokens among them, by these ranks.
    """

    rank: int
    generation: int
    losses: dist.ProcessGroup
    collective: dict[int, HostGroup]
    replica: dict[tuple[int, ...], HostGroup]

    def close(self) -> None:
        """Give the groups back. All members are done with them when the last one closes."""
        dist.destroy_process_group(self.losses)
        for group in (*self.collective.values(), *self.replica.values()):
            group.close()


def open_groups(plan: Plan, program: RankProgram, *, generation: int, timeout: timedelta) -> Groups:
    """Open the rank's groups of a plan and its program inside the job; all ranks call it.

    `generation` counts the runtimes of this job, so that groups made after a failure cannot meet the remains
    of earlier ones.

    Raises:
        InputError: when the job has not as many ranks as the program.
    """
    world_size = dist.get_world_size()
    if world_size != program.ranks:
        raise InputError(
            Violation(
                "runtime",
                f"the job has {world_size} ranks, the plan uses {program.ranks}",
                str(program.ranks),
            )
        )
    losses = dist.new_group(timeout=timeout, backend=BACKEND, group_desc=f"weft {generation} losses")
    # Two runtimes of one generation may follow each other; torch has numbered the groups of both.
    prefix = f"{generation} {losses.group_name}"
    return Groups(
        rank=program.rank,
        generation=generation,
        losses=losses,
        collective={
            number: HostGroup.open(f"{prefix} collective {number}", ranks, timeout)
            for number, ranks in sorted(program.groups.items())
        },
        replica={
            ranks: HostGroup.open(f"{prefix} replica ranks {ranks}", ranks, timeout)
            for ranks in replica_groups(plan, program.rank)
        },
    )


def replica_groups(plan: Plan, rank: int) -> list[tuple[int, ...]]:
    """Return the ranks with which a rank divides layers or tokens, several each, in order."""
    groups = {
        group
        for stage, ranks in plan.stages_of(rank).items()
        for along in plan.grid(stage).groups(ranks)
        for group in along
    }
    return sorted(group for group in groups if len(group) > 1 and rank in group)
