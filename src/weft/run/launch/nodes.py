"""`JobNodes`: the nodes of a job, by their ranks, and which of them share the run directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.errors import InputError, Violation

# Ranks, rising.
Ranks = tuple[int, ...]


class RankPlace(NamedTuple):
    """The place of a rank in its job and on its node, as torchrun states it."""

    rank: int
    world_size: int
    local_rank: int
    local_ranks: int

    @classmethod
    def of(cls, environment: Mapping[str, str] | None = None) -> RankPlace:
        """Return the place that the variables of torchrun state; without RANK the job is one process.

        Raises:
            InputError: when some of the variables are missing.
        """
        environment = os.environ if environment is None else environment
        if "RANK" not in environment:
            return cls(0, 1, 0, 1)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        problems = [
            Violation(
                "environment",
                f"{name} is {environment.get(name)!r}, allowed: a whole number (torchrun sets it)",
            )
            for name in names
            if not environment.get(name, "").isdigit()
        ]
        if problems:
            raise InputError(problems)
        return cls(*(int(environment[name]) for name in names))


@dataclass(frozen=True, slots=True)
class JobNodes:
    """The nodes of a job, seen from one rank.

    Attributes:
        rank: the one that sees them.
        nodes: the ranks of each node.
        folders: the ranks that see each run directory, those of rank 0 first. Nodes with a common file system
            are in one folder.
        checkpoint_folders: as `folders`, for the directories of checkpoints; None: alike.
        hosts: the name of each node; empty for a job of one node.
    """

    rank: int
    nodes: tuple[Ranks, ...]
    folders: tuple[Ranks, ...]
    checkpoint_folders: tuple[Ranks, ...] | None = None
    hosts: tuple[str, ...] = ()

    @classmethod
    def one(cls, rank: int, ranks: int) -> JobNodes:
        """Return a job of one node."""
        every = tuple(range(ranks))
        return cls(rank, (every,), (every,))

    @classmethod
    def of(
        cls,
        rank: int,
        local_ranks: Mapping[int, int],
        folder_of: Mapping[int, int],
        checkpoints_of: Mapping[int, int],
        host_of: Mapping[int, str],
    ) -> JobNodes:
        """Return the nodes with these numbers of ranks, folders and hosts, by their first ranks.

        The ranks of a node follow each other.
        """
        nodes = {leader: tuple(range(leader, leader + local_ranks[leader])) for leader in sorted(local_ranks)}
        folders, checkpoints = (_together(nodes, one) for one in (folder_of, checkpoints_of))
        hosts = tuple(host_of[leader] for leader in nodes)
        return cls(rank, tuple(nodes.values()), folders, checkpoints, hosts)

    def name_of(self, rank: int) -> str:
        """Return the name of a rank for messages, with its host if there are several nodes."""
        hosts = (host for own, host in zip(self.nodes, self.hosts, strict=False) if rank in own)
        return " on ".join([f"rank {rank}", *hosts])

    @property
    def at_checkpoints(self) -> JobNodes:
        """Nodes alike, with the folders of their checkpoints."""
        return replace(self, folders=self.checkpoint_folders or self.folders)

    @property
    def folder(self) -> Ranks:
        """The ranks that see this rank's run directory."""
        return next(one for one in self.folders if self.rank in one)

    @property
    def leads_folder(self) -> bool:
        """True if the rank makes, moves and removes files for all ranks of its folder."""
        return self.folder[0] == self.rank

    @property
    def leads_node(self) -> bool:
        return any(one[0] == self.rank for one in self.nodes)

    @property
    def folder_leaders(self) -> Ranks:
        return tuple(one[0] for one in self.folders)

    @property
    def are_apart(self) -> bool:
        """True if some ranks see another run directory than others."""
        return len(self.folders) > 1


def _together(nodes: Mapping[int, Ranks], folder_of: Mapping[int, int]) -> tuple[Ranks, ...]:
    """Return the ranks of each folder, from the ranks and the folder of each node."""
    folders = sorted(set(folder_of.values()))
    return tuple(
        tuple(one for leader, ranks in nodes.items() if folder_of[leader] == folder for one in ranks)
        for folder in folders
    )
