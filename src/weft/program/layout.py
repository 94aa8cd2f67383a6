"""`PipelineLayout`: the parts of a plan that the lowering needs.

Pipelines are equal parts of a plan that exchange no messages. Along a path through a pipeline, every stage
has one replica; a pipeline's paths share its micro-batches equally. Mostly a pipeline has one path. Several
paths may run over the same devices, each with its own replica of every stage (chimera). Or stages have unlike
numbers of replicas in a pipeline. Neighbouring paths then share a replica, which takes micro-batches of all
of them in turn (PipeDream, SOSP 2019, section 3.2). Stages may also have unlike numbers of ranks in each
replica (`weft.program.lanes`). The graph of stages may be any DAG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm

import numpy as np

from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.program.program import NONE


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """The ranks, bytes and splits of one stage.

    Attributes:
        replicas: ranks of each replica. Ranks of one replica share the stage by tensor and context
            parallelism. Ranks at the same position (lane) of different replicas hold the same weights. A
            replica of fewer ranks than the widest one has several of its shards on each rank.
        gradient_bytes: bytes of weight gradients that one rank of the widest replica reduces per step.
        weight_bytes: bytes of weights that one rank gathers if the replicas shard them.
        splits: number of the stage's own equal micro-batches per micro-batch of the batch.
    """

    replicas: tuple[tuple[int, ...], ...]
    gradient_bytes: int = 0
    weight_bytes: int = 0
    splits: int = 1

    @cached_property
    def widths(self) -> Ints:
        """The lanes of each replica, shape (replicas,)."""
        return np.array([len(ranks) for ranks in self.replicas], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """Stages, their ranks and their messages.

    Attributes:
        stages: in topological order.
        micro_batches: micro-batches per step of each path of all pipelines; path p of pipeline j is number
            j * paths + p, and runs the next `micro_batches[j * paths + p]` of the global batch.
        message_bytes: for each edge (producer, consumer) of the stage graph, the bytes that one rank sends
            per micro-batch of the stage with more splits.
        returned_bytes: the same of the gradient in return; default: as many.
        own_bytes: by pipeline, both of these; empty if all pipelines have equally many lanes.
        paths: number of paths through one pipeline, a multiple of each stage's `copies`.
        frozen_stages: number of untrained stages, from the first on; no gradient reaches them.
        sources: the stages that read samples; default: the stages that read no other stage.
        servers: number of ranks behind those of the stages that hold no stage.
    """

    stages: tuple[StageLayout, ...]
    micro_batches: tuple[int, ...]
    message_bytes: Mapping[tuple[int, int], int]
    paths: int = 1
    frozen_stages: int = 0
    sources: tuple[int, ...] = ()
    returned_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    own_bytes: tuple[tuple[Mapping[tuple[int, int], int], Mapping[tuple[int, int], int]], ...] = ()
    servers: int = 0

    @property
    def replicas(self) -> int:
        """The paths of all pipelines; the replicas of every stage unless the layout `deals`."""
        return len(self.micro_batches)

    @property
    def pipelines(self) -> int:
        return self.replicas // self.paths

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """The replicas of each stage in one pipeline."""
        return tuple(len(stage.replicas) // self.pipelines for stage in self.stages)

    @cached_property
    def deals(self) -> bool:
        """True if the stages have unlike numbers of replicas, so that some run the micro-batches of several
        paths."""
        return len(set(self.copies)) > 1

    @property
    def most_replicas(self) -> int:
        """The replicas of the stage with most of them."""
        return max(len(stage.replicas) for stage in self.stages)

    @cached_property
    def lanes(self) -> tuple[int, ...]:
        """The ranks of each replica of a stage, by stage; those of the widest of unlike replicas."""
        return tuple(int(stage.widths.max()) for stage in self.stages)

    @property
    def most_lanes(self) -> int:
        """The lanes of the stage with most of them."""
        return max(self.lanes)

    @cached_property
    def mixes_lanes(self) -> bool:
        """True if stages, or replicas of one, have unlike numbers of lanes."""
        return len(set(self.lanes)) > 1 or self.mixes_replicas

    @cached_property
    def mixes_replicas(self) -> bool:
        """True if replicas of one stage have unlike numbers of lanes."""
        return any(int(stage.widths.min()) < int(stage.widths.max()) for stage in self.stages)

    def pipeline_lanes(self, pipeline: int) -> tuple[int, ...]:
        """Return the ranks of each stage's replica in a pipeline."""
        if not self.mixes_replicas:
            return self.lanes
        return tuple(
            int(stage.widths[pipeline * copies])
            for stage, copies in zip(self.stages, self.copies, strict=True)
        )

    def of_lanes(self, lanes: tuple[int, ...]) -> PipelineLayout:
        """Return the layout with the bytes of messages of pipelines whose replicas have these ranks."""
        if not self.own_bytes:
            return self
        one = next(one for one in range(self.pipelines) if self.pipeline_lanes(one) == lanes)
        message_bytes, returned_bytes = self.own_bytes[one]
        return replace(self, message_bytes=message_bytes, returned_bytes=returned_bytes)

    @cached_property
    def path_copies(self) -> Ints:
        """The replica of each stage, counted in its pipeline, that each path uses, shape (paths, stages)."""
        paths: Ints = np.arange(self.paths, dtype=np.int64)
        return paths[:, None] * np.array(self.copies, dtype=np.int64) // self.paths

    @property
    def turns(self) -> Ints:
        """The paths in the order in which they take turns, shape (paths,).

        The micro-batches of one turn each, one after the other, take the replicas of every stage in turn.
        """
        path = np.arange(self.paths, dtype=np.int64)
        shared = [path % (self.paths // copies) for copies in sorted(set(self.copies))]
        return np.lexsort([path, *shared])

    @cached_property
    def pipeline_micro_batches(self) -> tuple[int, ...]:
        """Micro-batches per step of each pipeline, over all of its paths."""
        return tuple(map(sum, zip(*[iter(self.micro_batches)] * self.paths, strict=True)))

    @property
    def ranks(self) -> int:
        """One more than the highest rank."""
        return self.server_ranks.stop

    @property
    def server_ranks(self) -> range:
        """The ranks that hold no stage."""
        first = 1 + max(int(ranks.max()) for ranks in self.rank_tables)
        return range(first, first + self.servers)

    @cached_property
    def rank_tables(self) -> tuple[Ints, ...]:
        """For each stage of a valid layout, the ranks of its replicas, shape (replicas, lanes).

        It is -1 where a replica has fewer lanes than others.
        """
        # Stages on the same ranks share a table: there may be thousands of replicas.
        tables = {held: rank_rows(held) for held in {stage.replicas for stage in self.stages}}
        return tuple(tables[stage.replicas] for stage in self.stages)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The edges of the stage graph, sorted."""
        return tuple(sorted(self.message_bytes))

    @property
    def splits(self) -> Ints:
        """The splits of each stage, shape (stages,)."""
        return np.array([stage.splits for stage in self.stages], dtype=np.int64)

    @property
    def unfed(self) -> tuple[int, ...]:
        """The stages that read no other stage."""
        fed = {consumer for _, consumer in self.message_bytes}
        return tuple(stage for stage in range(len(self.stages)) if stage not in fed)

    @cached_property
    def first_micro_batch(self) -> tuple[int, ...]:
        """Global number of the first micro-batch of each path."""
        return tuple(accumulate(self.micro_batches[:-1], initial=0))

    @cached_property
    def placement(self) -> Ints:
        """Device of each stage on each path, shape (paths, stages).

        Devices count in the order of their first use, by the stages of the first path, then of the next.
        """
        devices: dict[tuple[int, ...], int] = {}
        return np.array(
            [
                [
                    devices.setdefault(stage.replicas[copy], len(devices))
                    for stage, copy in zip(self.stages, copies, strict=True)
                ]
                for copies in self.path_copies.tolist()
            ],
            dtype=np.int64,
        )

    @cached_property
    def rank_table(self) -> Ints:
        """The rank of each (pipeline, device, lane), devices as in `placement`.

        It is -1 where a device has fewer lanes than others.
        """
        first_place = np.unique(self.placement, return_index=True)[1]
        homes = [divmod(place, len(self.stages)) for place in first_place.tolist()]
        table = np.full((self.pipelines, len(homes), self.most_lanes), NONE, dtype=np.int64)
        for device, (path, stage) in enumerate(homes):
            ranks = self.rank_tables[stage][self.path_copies[path, stage] :: self.copies[stage]]
            table[:, device, : self.lanes[stage]] = ranks
        return table

    def of_length(self, micro_batches: int) -> PipelineLayout:
        """Return the layout with so many micro-batches, 1 or more, on each path.

        It shares the tables of ranks, and a valid layout stays so.
        """
        found = replace(self, micro_batches=(micro_batches,) * self.replicas)
        if not self._problems:
            vars(found).update({name: one for name, one in vars(self).items() if name in _OF_RANKS})
        return found

    def require_valid(self) -> None:
        """Check that a program can be built for the layout.

        Raises:
            InputError: with all violations.
        """
        if self._problems:
            raise InputError(self._problems)

    @cached_property
    def _problems(self) -> list[Violation]:
        """A violation for each mistake; none if a program can be built for the layout."""
        if not self.stages or not self.micro_batches:
            return [Violation("layout", "needs at least one stage and one pipeline replica")]
        found = {held: _stage_problems(held, self) for held in {stage.replicas for stage in self.stages}}
        problems = [
            Violation(f"stage {stage}", problem)
            for stage, one in enumerate(self.stages)
            for problem in found[one.replicas]
        ]
        problems += [
            Violation(f"pipeline replica {replica}", f"has {count} micro-batches; at least 1 is allowed", "1")
            for replica, count in enumerate(self.micro_batches)
            if count < 1
        ]
        problems += [*_graph_problems(self), *_path_problems(self), *_frozen_problems(self)]
        # These checks need stages that are well-formed by themselves.
        return problems or _lane_problems(self) or _device_problems(self)


# What micro-batches do not change.
_OF_RANKS = ("copies", "lanes", "path_copies", "placement", "rank_table", "rank_tables", "_problems")


def rank_rows(held: Sequence[Sequence[int]]) -> Ints:
    """Return the ranks of replicas, -1 behind those of narrower ones, shape (replicas, lanes)."""
    width = max(map(len, held))
    if min(map(len, held)) < width:
        held = [[*ranks, *[NONE] * (width - len(ranks))] for ranks in held]
    return np.array(held, dtype=np.int64)


def _graph_problems(layout: PipelineLayout) -> list[Violation]:
    """Return the violations of edges that lead to no later stage, or else the violations of splits."""
    return [
        Violation("layout", f"edge {edge} must go from a stage to a later one of {len(layout.stages)}")
        for edge in layout.edges
        if not 0 <= edge[0] < edge[1] < len(layout.stages)
    ] or _split_problems(layout)


def _split_problems(layout: PipelineLayout) -> list[Violation]:
    """Return the violations of splits below 1, or else of neighbours' splits that are no multiples."""
    problems = [
        Violation(f"stage {stage}", f"splits micro-batches in {one.splits}; at least 1 is allowed", "1")
        for stage, one in enumerate(layout.stages)
        if one.splits < 1
    ]
    return problems or [
        Violation(
            f"stages {producer} and {consumer}",
            f"split micro-batches in {fewer} and {more}; one must be a multiple of the other",
            f"{fewer} and {max(1, more // fewer) * fewer}",
        )
        for producer, consumer in layout.edges
        for fewer, more in [sorted((layout.stages[producer].splits, layout.stages[consumer].splits))]
        if more % fewer
    ]


def _lane_problems(layout: PipelineLayout) -> list[Violation]:
    """Return the violations of numbers of lanes: each divides the next larger one.

    Replicas with unlike ones form pipelines of one path.
    """
    known = {
        width: stage
        for stage, one in reversed([*enumerate(layout.stages)])
        for width in set(one.widths.tolist())
    }
    problems = [
        Violation(
            f"stage {known[more]}",
            f"has replicas of {more} ranks, others have {fewer}; one must be a multiple of the other",
            str(more // fewer * fewer),
        )
        for fewer, more in pairwise(sorted(known))
        if more % fewer
    ]
    if layout.mixes_replicas and layout.paths > 1:
        problem = (
            f"{layout.paths} paths through each pipeline: replicas with unlike numbers of ranks need one"
        )
        problems.append(Violation("layout", problem, "1"))
    return problems


def _path_problems(layout: PipelineLayout) -> list[Violation]:
    if layout.paths < 1 or layout.replicas % layout.paths:
        problem = f"{layout.replicas} replicas cannot make whole pipelines of {layout.paths} paths each"
        return [Violation("layout", problem)]
    shares = zip(*[iter(layout.micro_batches)] * layout.paths, strict=True)
    whole = lcm(*layout.copies)
    if 0 not in layout.copies and layout.paths % whole == 0 and layout.paths > whole:
        problem = f"{layout.paths} paths: stages with {list(layout.copies)} replicas have {whole}"
        return [Violation("layout", problem, str(whole))]
    return [
        Violation(f"pipeline {pipeline}", f"its paths must have equal micro-batches, not {list(share)}")
        for pipeline, share in enumerate(shares)
        if share.count(share[0]) < len(share)
    ]


def _frozen_problems(layout: PipelineLayout) -> list[Violation]:
    last = len(layout.stages) - 1
    if 0 <= layout.frozen_stages <= last:
        return []
    problem = f"{layout.frozen_stages} is not one of 0..{last}; one stage must train"
    return [Violation("frozen stages", problem, str(min(max(layout.frozen_stages, 0), last)))]


def _device_problems(layout: PipelineLayout) -> list[Violation]:
    placement, table = layout.placement, layout.rank_table
    if _devices_are_shared_rightly(layout, placement, table):
        return []
    problems = [
        Violation(f"stage {stage}", "has two paths on one device; a device holds a stage once")
        for stage, devices in enumerate(placement.T.tolist())
        if len(set(devices)) < layout.copies[stage]
    ]
    users: dict[int, tuple[int, int, int]] = {}
    for stage, one in enumerate(layout.stages):
        for replica, ranks in enumerate(one.replicas):
            where = f"stage {stage}, replica {replica}"
            pipeline, copy = divmod(replica, layout.copies[stage])
            device = int(placement[copy * layout.paths // layout.copies[stage], stage])
            for lane, rank in enumerate(ranks):
                place = (pipeline, device, lane)
                if users.setdefault(rank, place) != place:
                    problem = f"rank {rank} already has another place in the pipelines"
                    problems.append(Violation(where, problem))
            held = table[pipeline, device]
            if tuple(held[held != NONE].tolist()) != ranks:
                problem = "stages that share a device in one pipeline must share it in all"
                problems.append(Violation(where, problem))
    return problems


def _devices_are_shared_rightly(layout: PipelineLayout, placement: Ints, table: Ints) -> bool:
    """Return True if no rank has two places and all stages have the devices of the table."""
    ranks = table[table != NONE]
    return len(np.unique(ranks)) == ranks.size and all(
        len(set(devices)) == layout.copies[stage]
        and all(
            np.array_equal(
                table[:, device, : layout.lanes[stage]],
                layout.rank_tables[stage][layout.path_copies[path, stage] :: layout.copies[stage]],
            )
            for path, device in enumerate(devices)
        )
        for stage, devices in enumerate(placement.T.tolist())
    )


def _divides_paths(replicas: int, layout: PipelineLayout) -> bool:
    """Return True if each pipeline has an equal number of replicas of a stage, which share its paths."""
    if layout.paths < 1 or layout.replicas % layout.paths:
        return False
    copies, rest = divmod(replicas, layout.pipelines)
    return copies > 0 and rest == 0 and layout.paths % copies == 0


def _stage_problems(held: Sequence[Sequence[int]], layout: PipelineLayout) -> list[str]:
    """Return the mistakes in the ranks of a stage's replicas, in words."""
    problems = []
    widths = set(map(len, held))
    if len(held) != layout.replicas and not _divides_paths(len(held), layout):
        problems.append(f"has {len(held)} replicas, but there are {layout.replicas} pipelines")
    if len(widths) == 1 and 0 not in widths:
        # All at once, because there may be thousands of replicas.
        ordered = np.sort(np.array(held, dtype=np.int64), axis=1)
        if not (ordered < 0).any() and (np.diff(ordered) > 0).all():
            return problems
    for replica, ranks in enumerate(held):
        if not ranks:
            problems.append(f"replica {replica} has no rank")
        if len(set(ranks)) != len(ranks) or min(ranks, default=0) < 0:
            problems.append(f"replica {replica}: ranks {list(ranks)} must be different and not negative")
    return problems
