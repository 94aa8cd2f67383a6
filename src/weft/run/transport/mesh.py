"""The process groups of one runtime: disposable, numbered by generation, kept in no module.

A rank opens its own groups only. All ranks open theirs in one order, so that no cycle of waits arises. The
order is: the losses, the Program's groups by number, each replica's tensor and context ranks.

Torch's `new_group` makes every rank open every group. Its `use_local_synchronization` avoids this, but names
a group by the number of the rank's groups so far. Then ranks with different numbers of groups never meet. And
a group that is made again finds the remains of the former one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from weft.describe.plan import Plan
from weft.describe.units import counted
from weft.errors import InputError, Violation
from weft.program.rank_program import RankProgram
from weft.run.transport.device_group import GLOO, DeviceGroup
from weft.run.transport.transports import Transport


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process groups of one rank.

    `name` begins the names of all. `collective` maps the group numbers of the rank's part of the Program to
    groups. `replica` has the groups that divide layers or tokens, by their ranks. The losses go through host
    memory.
    """

    name: str
    rank: int
    generation: int
    losses: dist.ProcessGroup
    collective: dict[int, DeviceGroup]
    replica: dict[tuple[int, ...], DeviceGroup]

    @property
    def all(self) -> list[DeviceGroup]:
        """All groups of the rank, that of the losses too."""
        return [DeviceGroup(self.losses), *self.collective.values(), *self.replica.values()]

    def close(self) -> None:
        """Release the groups. All members are done with them when the last one closes."""
        dist.destroy_process_group(self.losses)
        for group in (*self.collective.values(), *self.replica.values()):
            group.close()


def open_groups(
    plan: Plan, program: RankProgram, transport: Transport, *, generation: int, timeout: timedelta
) -> Groups:
    """Open the rank's groups of a plan and its program inside the job; all ranks call it.

    `generation` counts the runtimes of this job: groups made after a failure never meet remains of earlier
    ones.

    Raises:
        InputError: when the job's number of ranks differs from the program's.
    """
    world_size = dist.get_world_size()
    if world_size != program.ranks:
        raise InputError(
            Violation(
                "runtime",
                f"the job has {counted(world_size, 'rank')}, the plan uses {program.ranks}",
                str(program.ranks),
            )
        )
    losses = dist.new_group(timeout=timeout, backend=GLOO, group_desc=f"weft {generation} losses")
    # One generation may have two runtimes in turn; torch's group numbers tell them apart.
    name = f"{generation} {losses.group_name}"
    return Groups(
        name=name,
        rank=program.rank,
        generation=generation,
        losses=losses,
        collective={
            number: transport.open_group(f"{name} collective {number}", ranks, timeout)
            for number, ranks in sorted(program.groups.items())
        },
        replica={
            ranks: transport.open_group(f"{name} replica ranks {ranks}", ranks, timeout)
            for ranks in plan.divided_groups(program.rank)
        },
    )
