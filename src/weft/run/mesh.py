"""The process groups of one runtime: disposable, numbered by generation, kept in no module.

torch asks every rank of the job to create every group in the same order, so all ranks walk the same list:
the groups of the Program, one for losses, those of the tensor and of the context ranks of each replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.program.kinds import KINDS
from weft.program.program import NONE, Program
from weft.run.transport import HostGroup

BACKEND = "gloo"


@dataclass(frozen=True, kw_only=True)
class Groups:
    """What one rank communicates over.

    `collective` maps an index into `Program.groups` to its process group, for the groups that the rank is a
    member of and the Program uses. `replica` maps ranks of a replica that divide layers or tokens to theirs.
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


def open_groups(plan: Plan, program: Program, rank: int, *, generation: int, timeout: timedelta) -> Groups:
    """Create the groups of a plan and its program inside the job's default process group; all ranks call it.

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

    def create(name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        description = f"weft {generation} {name}"
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, backend=BACKEND, group_desc=description
        )
        return group

    everyone = tuple(range(world_size))
    losses = create("losses", everyone)
    created = {index: create(f"collective {index}", program.groups[index]) for index in used_groups(program)}
    mine = {index: group for index, group in created.items() if rank in program.groups[index]}
    inside = {ranks: create(f"replica ranks {ranks}", ranks) for ranks in replica_groups(plan)}
    return Groups(
        rank=rank,
        generation=generation,
        losses=losses,
        collective={index: HostGroup(group) for index, group in mine.items()},
        replica={ranks: HostGroup(group) for ranks, group in inside.items() if rank in ranks},
    )


def used_groups(program: Program) -> list[int]:
    """Indices of the groups that some collective of the program runs over, in order."""
    collective = [code for code, kind in enumerate(KINDS) if kind.collective]
    found = {
        int(group)
        for kind, group in zip(program.columns.kind, program.columns.group, strict=True)
        if int(kind) in collective and group != NONE
    }
    return sorted(found)


def replica_groups(plan: Plan) -> list[tuple[int, ...]]:
    """The ranks that divide layers or tokens among them, several each, in order."""
    replicas = {
        (plan.grid(index), copy.ranks) for index, stage in enumerate(plan.stages) for copy in stage.replicas
    }
    groups = {group for grid, ranks in replicas for along in grid.groups(ranks) for group in along}
    return sorted(group for group in groups if len(group) > 1)
