"""`PipelineLayout`: what the lowering needs to know of a plan, and nothing more.

Pipelines are homogeneous: all stages have the same number of replicas, and replica j of every stage belongs
to pipeline j. A pipeline may run its stages along several paths over the same devices, each with its own
copy of the weights. Then every path is a replica: path p of pipeline j is replica j * paths + p. The graph
of stages may be any DAG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np

from weft.describe.plan import context_groups_of
from weft.errors import InputError, Violation
from weft.program.program import NONE, Ints


def islands_of(replicas: Sequence[Sequence[int]], size: int | None) -> list[list[int]]:
    """The replicas of each island of `size`, given the ranks of every replica; None: one island of all.

    Neighbours in rank form an island, because the devices of a node have neighbouring ranks.
    """
    order = list(range(len(replicas)))
    if size is None or size == len(replicas):
        return [order]
    order.sort(key=lambda replica: min(replicas[replica]))
    return [order[first : first + size] for first in range(0, len(order), size)]


def counterparts_of(islands: Sequence[Sequence[int]]) -> list[list[int]]:
    """The replicas with the same place, and so the same share of a stage, in all islands."""
    return [list(replicas) for replicas in zip(*islands, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Where one stage runs.

    Attributes:
        replicas: ranks of each replica; ranks of one replica share the stage by tensor and context
            parallelism, and ranks at the same place (lane) of different replicas hold the same weights.
        gradient_bytes: bytes of weight gradients that one rank reduces per step.
        weight_bytes: bytes of weights that one rank gathers where the replicas share them out.
    """

    replicas: tuple[tuple[int, ...], ...]
    gradient_bytes: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TiedWeights:
    """A weight of which each of several stages has a copy.

    Attributes:
        stages: who has one, rising.
        gradient_bytes: bytes of its gradient on one rank; the stages' own gradients are without it.
    """

    stages: tuple[int, ...]
    gradient_bytes: int


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """Stages, their ranks and their messages.

    Attributes:
        stages: in topological order.
        micro_batches: micro-batches per step of each pipeline replica; replica j runs the next
            `micro_batches[j]` of the global batch.
        message_bytes: for each edge (producer, consumer) of the stage graph, the bytes that one rank sends
            per micro-batch; the gradient that comes back is as large.
        paths: ways through the devices of one pipeline; its micro-batches are shared equally among them.
        frozen_stages: so many stages from the first on are not trained: no gradient reaches them.
        tied: weights that stages share; all of them are trained.
        island: replicas that share states out among themselves; None: all of them.
        context_parallel: how many ranks of a replica hold the same weights and compute other tokens; those
            that share a stage are neighbours.
    """

    stages: tuple[StageLayout, ...]
    micro_batches: tuple[int, ...]
    message_bytes: Mapping[tuple[int, int], int]
    paths: int = 1
    frozen_stages: int = 0
    tied: tuple[TiedWeights, ...] = ()
    island: int | None = None
    context_parallel: int = 1

    @property
    def replicas(self) -> int:
        return len(self.micro_batches)

    @property
    def pipelines(self) -> int:
        return self.replicas // self.paths

    @property
    def pipeline_micro_batches(self) -> tuple[int, ...]:
        """Micro-batches per step of each pipeline, all of its paths together."""
        starts = range(0, self.replicas, self.paths)
        return tuple(sum(self.micro_batches[start : start + self.paths]) for start in starts)

    @property
    def ranks(self) -> int:
        """One more than the highest rank."""
        return 1 + max(int(ranks.max()) for ranks in self.rank_tables)

    @cached_property
    def rank_tables(self) -> tuple[Ints, ...]:
        """By stage of a valid layout the ranks of its replicas, shape (replicas, lanes)."""
        return tuple(np.array(stage.replicas, dtype=np.int64) for stage in self.stages)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The stage graph, sorted."""
        return tuple(sorted(self.message_bytes))

    @property
    def first_micro_batch(self) -> tuple[int, ...]:
        """Global number of each replica's first micro-batch."""
        return tuple(accumulate(self.micro_batches[:-1], initial=0))

    @property
    def placement(self) -> Ints:
        """Device of each stage on each path, shape (paths, stages).

        Devices count in the order in which the stages of the first path, then of the next ones, use them.
        """
        devices: dict[tuple[int, ...], int] = {}
        return np.array(
            [
                [devices.setdefault(stage.replicas[path], len(devices)) for stage in self.stages]
                for path in range(self.paths)
            ],
            dtype=np.int64,
        )

    def rank_table(self) -> Ints:
        """Rank of (pipeline, device, lane), devices as in `placement`."""
        first_place = np.unique(self.placement, return_index=True)[1]
        homes = [divmod(place, len(self.stages)) for place in first_place.tolist()]
        return np.stack([self.rank_tables[stage][path :: self.paths] for path, stage in homes], axis=1)

    @property
    def islands(self) -> int:
        """How many islands share a stage out, each all of it."""
        return 1 if self.island is None else self.replicas // self.island

    def group_table(self) -> tuple[tuple[tuple[int, ...], ...], Ints]:
        """The groups of ranks that share out the same weights, and that of (stage, replica, lane).

        Without islands they are all that hold the same weights. Stages with the same holders share groups.
        """
        return self._groups([islands_of(stage.replicas, self.island) for stage in self.stages])

    def across_group_table(self) -> tuple[tuple[tuple[int, ...], ...], Ints]:
        """The groups of ranks with the same share in all islands, and that of (stage, replica, lane).

        Without islands there are none.
        """
        if self.islands == 1:
            return self._groups([[] for _ in self.stages])
        islands = (islands_of(stage.replicas, self.island) for stage in self.stages)
        return self._groups([counterparts_of(one) for one in islands])

    def _groups(self, parts: Sequence[list[list[int]]]) -> tuple[tuple[tuple[int, ...], ...], Ints]:
        """A group for each lane of each part of a stage's replicas; that of (stage, replica, lane)."""
        numbers: dict[bytes, int] = {}
        groups: list[tuple[int, ...]] = []
        lanes = len(self.stages[0].replicas[0])
        table = np.full((len(self.stages), self.replicas, lanes), NONE, dtype=np.int64)
        for index, ranks in enumerate(self.rank_tables):
            for replicas in parts[index]:
                for lane in range(lanes):
                    group = ranks[replicas, lane]
                    number = numbers.setdefault(np.sort(group).tobytes(), len(groups))
                    if number == len(groups):
                        groups.append(tuple(group.tolist()))
                    table[index, replicas, lane] = number
        return tuple(groups), table

    def tied_group_table(self) -> tuple[tuple[tuple[int, ...], ...], Ints]:
        """The groups of ranks with a copy of each tied weight, and that of (tied weight, lane).

        Lanes that divide the tokens hold the same copies and are in one group.
        """
        shares = len(self.stages[0].replicas[0]) // self.context_parallel
        groups = []
        for one in self.tied:
            replicas = (ranks for stage in one.stages for ranks in self.stages[stage].replicas)
            alike = zip(*(context_groups_of(ranks, self.context_parallel) for ranks in replicas), strict=True)
            groups += [tuple(dict.fromkeys(chain.from_iterable(copies))) for copies in alike]
        table = np.arange(len(groups), dtype=np.int64).reshape(len(self.tied), shares)
        return tuple(groups), np.tile(table, (1, self.context_parallel))

    def require_valid(self) -> None:
        """Refuse a layout that no program can be built for.

        Raises:
            InputError: with every violation.
        """
        if self._problems:
            raise InputError(self._problems)

    @cached_property
    def _problems(self) -> list[Violation]:
        if not self.stages or not self.micro_batches:
            return [Violation("layout", "needs at least one stage and one pipeline replica")]
        lanes = max((len(ranks) for ranks in self.stages[0].replicas[:1]), default=1) or 1
        problems = [
            Violation(f"stage {stage}", problem)
            for stage, layout in enumerate(self.stages)
            for problem in _stage_problems(layout, self.replicas, lanes)
        ]
        problems += [
            Violation(f"pipeline replica {replica}", f"has {count} micro-batches; at least 1 is allowed", "1")
            for replica, count in enumerate(self.micro_batches)
            if count < 1
        ]
        problems += [
            Violation("layout", f"edge {edge} must go from a stage to a later one of {len(self.stages)}")
            for edge in self.edges
            if not 0 <= edge[0] < edge[1] < len(self.stages)
        ]
        problems += [
            Violation(
                "layout", f"tied weights must have two or more trained stages, rising, not {one.stages}"
            )
            for one in self.tied
            if not _are_trained_stages(one.stages, range(self.frozen_stages, len(self.stages)))
        ]
        problems += self._path_problems()
        if self.island is not None and (self.island < 1 or self.replicas % self.island):
            problem = f"{self.replicas} replicas are not whole islands of {self.island}"
            problems.append(Violation("layout", problem))
        if self.context_parallel < 1 or lanes % self.context_parallel:
            problem = (
                f"replicas of {lanes} ranks are not whole groups of {self.context_parallel} context ranks"
            )
            problems.append(Violation("layout", problem))
        if not 0 <= self.frozen_stages < len(self.stages):
            problems.append(
                Violation(
                    "frozen stages",
                    f"{self.frozen_stages} is not one of 0..{len(self.stages) - 1}; one stage must train",
                    str(min(max(self.frozen_stages, 0), len(self.stages) - 1)),
                )
            )
        # Sharing of devices is only meaningful among stages that are well-formed by themselves.
        return problems or self._device_problems()

    def _path_problems(self) -> list[Violation]:
        if self.paths < 1 or self.replicas % self.paths:
            return [
                Violation(
                    "layout", f"{self.replicas} replicas are not whole pipelines of {self.paths} paths each"
                )
            ]
        shares = [
            self.micro_batches[first : first + self.paths] for first in range(0, self.replicas, self.paths)
        ]
        return [
            Violation(f"pipeline {pipeline}", f"its paths must have equal micro-batches, not {list(share)}")
            for pipeline, share in enumerate(shares)
            if len(set(share)) > 1
        ]

    def _device_problems(self) -> list[Violation]:
        placement, table = self.placement, self.rank_table()
        if self._devices_are_shared_rightly(placement, table):
            return []
        problems = [
            Violation(f"stage {stage}", "has two paths on one device; a device holds a stage once")
            for stage, devices in enumerate(placement.T.tolist())
            if len(set(devices)) < self.paths
        ]
        users: dict[int, tuple[int, int, int]] = {}
        for stage, layout in enumerate(self.stages):
            for replica, ranks in enumerate(layout.replicas):
                pipeline, path = divmod(replica, self.paths)
                device = int(placement[path, stage])
                for lane, rank in enumerate(ranks):
                    place = (pipeline, device, lane)
                    if users.setdefault(rank, place) != place:
                        problems.append(
                            Violation(
                                f"stage {stage}, replica {replica}",
                                f"rank {rank} already has another place in the pipelines",
                            )
                        )
                if tuple(table[pipeline, device].tolist()) != ranks:
                    problems.append(
                        Violation(
                            f"stage {stage}, replica {replica}",
                            "stages that share a device in one pipeline must share it in all",
                        )
                    )
        return problems

    def _devices_are_shared_rightly(self, placement: Ints, table: Ints) -> bool:
        """Whether no rank has two places, and stages have the devices of the table; words need a closer
        look."""
        return len(np.unique(table)) == table.size and all(
            len(set(devices)) == self.paths
            and all(
                np.array_equal(table[:, device], self.rank_tables[stage][path :: self.paths])
                for path, device in enumerate(devices)
            )
            for stage, devices in enumerate(placement.T.tolist())
        )


def _are_trained_stages(stages: tuple[int, ...], trained: range) -> bool:
    return len(stages) > 1 and sorted(set(stages)) == list(stages) and set(stages) <= set(trained)


def _stage_problems(stage: StageLayout, replicas: int, lanes: int) -> list[str]:
    problems = []
    if len(stage.replicas) != replicas:
        problems.append(f"has {len(stage.replicas)} replicas, but there are {replicas} pipelines")
    if all(len(ranks) == lanes for ranks in stage.replicas):
        # All at once, for there may be thousands of them.
        ordered = np.sort(np.array(stage.replicas, dtype=np.int64).reshape(-1, lanes), axis=1)
        if not (ordered < 0).any() and (np.diff(ordered) > 0).all():
            return problems
    for replica, ranks in enumerate(stage.replicas):
        if len(ranks) != lanes:
            problems.append(f"replica {replica} has {len(ranks)} ranks; all must have {lanes}")
        if len(set(ranks)) != len(ranks) or min(ranks, default=0) < 0:
            problems.append(f"replica {replica}: ranks {list(ranks)} must be different and not negative")
    return problems
