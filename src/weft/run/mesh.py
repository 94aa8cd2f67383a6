"""The process groups of one runtime: disposable, numbered by generation, kept in no module.

torch asks every rank of the job to create every group in the same order, so all ranks walk the same list:
the groups of the Program, one for losses, one for the tensor ranks of each replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from weft.errors import InputError, Violation
from weft.program.kinds import KINDS
from weft.program.program import NONE, Program

BACKEND = "gloo"


@dataclass(frozen=True, kw_only=True)
class Groups:
    """What one rank communicates over.

    `collective` maps an index into `Program.groups` to its process group, for the groups that the rank is a
    member of and the Program uses. `tensor` maps the ranks of a replica that divide its stages to theirs.
    """

    rank: int
    generation: int
    losses: dist.ProcessGroup
    collective: dict[int, dist.ProcessGroup]
    tensor: dict[tuple[int, ...], dist.ProcessGroup]

    def close(self) -> None:
        """Give the groups back. All members are done with them when the last one closes."""
        for group in (self.losses, *self.collective.values(), *self.tensor.values()):
            dist.destroy_process_group(group)


def open_groups(program: Program, rank: int, *, generation: int, timeout: timedelta) -> Groups:
    """Create the groups of a program inside the job's default process group; every rank must call this.

    `generation` counts the runtimes of this job, so that groups made after a failure cannot meet the
    remains of earlier ones.

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
    tensor = {ranks: create(f"tensor ranks {ranks}", ranks) for ranks in tensor_groups(program)}
    return Groups(
        rank=rank,
        generation=generation,
        losses=losses,
        collective=mine,
        tensor={ranks: group for ranks, group in tensor.items() if rank in ranks},
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


def tensor_groups(program: Program) -> list[tuple[int, ...]]:
    """The ranks that divide stages among them, several each, in order."""
    return sorted({ranks for ranks in program.obligations.owners.values() if len(ranks) > 1})
