"""`PipelineLayout`: what the lowering needs to know of a plan, and nothing more.

Pipelines are homogeneous: replica j of every stage belongs to pipeline j, and all stages have the same number
of replicas. The graph of stages may be any DAG.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from weft.errors import InputError, Violation
from weft.program.program import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """Where one stage runs.

    Attributes:
        replicas: ranks of each replica; ranks of one replica share the stage by tensor parallelism, and ranks
            at the same place (lane) of different replicas hold the same weights.
        gradient_bytes: bytes of weight gradients that one rank reduces per step.
    """

    replicas: tuple[tuple[int, ...], ...]
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLayout:
    """Stages, their ranks and their messages.

    Attributes:
        stages: in topological order.
        micro_batches: micro-batches per step of each pipeline replica; replica j runs the next
            `micro_batches[j]` of the global batch.
        message_bytes: for each edge (producer, consumer) of the stage graph, the bytes that one rank sends
            per micro-batch; the gradient that comes back is as large.
    """

    stages: tuple[StageLayout, ...]
    micro_batches: tuple[int, ...]
    message_bytes: Mapping[tuple[int, int], int]

    @property
    def replicas(self) -> int:
        return len(self.micro_batches)

    @property
    def ranks(self) -> int:
        """One more than the highest rank."""
        return 1 + max(rank for stage in self.stages for ranks in stage.replicas for rank in ranks)

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
        """Device of each stage, shape (stages,); devices count in the order in which stages use them."""
        devices: dict[tuple[int, ...], int] = {}
        return np.array(
            [devices.setdefault(stage.replicas[0], len(devices)) for stage in self.stages], dtype=np.int64
        )

    def rank_table(self) -> Ints:
        """Rank of (replica, device, lane), devices as in `placement`."""
        first_stage = np.unique(self.placement, return_index=True)[1]
        return np.array(
            [
                [self.stages[stage].replicas[replica] for stage in first_stage]
                for replica in range(self.replicas)
            ],
            dtype=np.int64,
        )

    def require_valid(self) -> None:
        """Refuse a layout that no program can be built for.

        Raises:
            InputError: with every violation.
        """
        if not self.stages or not self.micro_batches:
            raise InputError(Violation("layout", "needs at least one stage and one pipeline replica"))
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
        # Sharing of devices is only meaningful among stages that are well-formed by themselves.
        problems = problems or self._device_problems()
        if problems:
            raise InputError(problems)

    def _device_problems(self) -> list[Violation]:
        problems = []
        users: dict[int, tuple[int, int, int]] = {}
        for stage, device in enumerate(self.placement.tolist()):
            for replica, ranks in enumerate(self.stages[stage].replicas):
                for lane, rank in enumerate(ranks):
                    place = (replica, device, lane)
                    if users.setdefault(rank, place) != place:
                        problems.append(
                            Violation(
                                f"stage {stage}, replica {replica}",
                                f"rank {rank} already has another place in the pipelines",
                            )
                        )
                if self.stages[int(np.argmax(self.placement == device))].replicas[replica] != ranks:
                    problems.append(
                        Violation(
                            f"stage {stage}, replica {replica}",
                            "stages that share a device in one pipeline must share it in all",
                        )
                    )
        return problems


def _stage_problems(stage: StageLayout, replicas: int, lanes: int) -> list[str]:
    problems = []
    if len(stage.replicas) != replicas:
        problems.append(f"has {len(stage.replicas)} replicas, but there are {replicas} pipelines")
    for replica, ranks in enumerate(stage.replicas):
        if len(ranks) != lanes:
            problems.append(f"replica {replica} has {len(ranks)} tensor ranks; all must have {lanes}")
        if len(set(ranks)) != len(ranks) or min(ranks, default=0) < 0:
            problems.append(f"replica {replica}: ranks {list(ranks)} must be different and not negative")
    return problems
