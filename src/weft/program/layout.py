"""`PipelineLayout`: what the lowering needs to know of a plan, and nothing more.

Pipelines are homogeneous: all stages have the same number of replicas, and replica j of every stage belongs
to pipeline j. A pipeline may run its stages along several paths over the same devices, each with its own
copy of the weights. Then every path is a replica: path p of pipeline j is replica j * paths + p. The graph
of stages may be any DAG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from weft.errors import InputError, Violation
from weft.program.layout_problems import problems_of
from weft.program.program import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Where one stage runs.

    Attributes:
        replicas: ranks of each replica; ranks of one replica share the stage by tensor and context
            parallelism, and ranks at the same place (lane) of different replicas hold the same weights.
        gradient_bytes: bytes of weight gradients that one rank reduces per step.
        weight_bytes: bytes of weights that one rank gathers where the replicas share them out.
        splits: the stage runs each micro-batch of the batch in so many equal ones of its own.
    """

    replicas: tuple[tuple[int, ...], ...]
    gradient_bytes: int = 0
    weight_bytes: int = 0
    splits: int = 1


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """Stages, their ranks and their messages.

    Attributes:
        stages: in topological order.
        micro_batches: micro-batches per step of each pipeline replica; replica j runs the next
            `micro_batches[j]` of the global batch.
        message_bytes: for each edge (producer, consumer) of the stage graph, the bytes that one rank sends
            per micro-batch of the one that splits more; the gradient that comes back is as large.
        paths: ways through the devices of one pipeline; its micro-batches are shared equally among them.
        frozen_stages: so many stages from the first on are not trained: no gradient reaches them.
        sources: the stages that read samples; default: those that read no other stage.
    """

    stages: tuple[StageLayout, ...]
    micro_batches: tuple[int, ...]
    message_bytes: Mapping[tuple[int, int], int]
    paths: int = 1
    frozen_stages: int = 0
    sources: tuple[int, ...] = ()

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
    def splits(self) -> Ints:
        """Those of the stages, shape (stages,)."""
        return np.array([stage.splits for stage in self.stages], dtype=np.int64)

    @property
    def unfed(self) -> tuple[int, ...]:
        """The stages that read no other one."""
        fed = {consumer for _, consumer in self.message_bytes}
        return tuple(stage for stage in range(len(self.stages)) if stage not in fed)

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

    def require_valid(self) -> None:
        """Refuse a layout that no program can be built for.

        Raises:
            InputError: with every violation.
        """
        if self._problems:
            raise InputError(self._problems)

    @cached_property
    def _problems(self) -> list[Violation]:
        return problems_of(self)
