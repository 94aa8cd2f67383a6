"""`StageSplit`: the layers that another stack gives to the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from weft.moves.partition import uniform_partition


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSplit:
    """The layers of each stage: those that a file lists, or equally many blocks in each.

    Stages are numbered along the model, and an embedding and a head are one layer each.

    Attributes:
        layers: those of every stage, as a file lists them; None: by the rule.
        first, last: blocks of all stages of the first and the last device; None: as many as on the others.
        counts_embedding, counts_head: it counts as so many of the blocks that are shared out.
    """

    layers: tuple[int, ...] | None = None
    first: int | None = None
    last: int | None = None
    counts_embedding: int = 0
    counts_head: int = 0

    def of(self, blocks: int, devices: int, loops: int) -> tuple[int, ...] | None:
        """Return the layers of each stage of a model with so many blocks between its embedding and head.

        Blocks that are left over go to the first of the stages that share equally. None: there are too few.
        """
        if self.layers is not None:
            return self.layers
        stages = range(devices * loops)
        own = {0: self.first, devices - 1: self.last}
        given = {stage: held // loops for stage in stages if (held := own.get(stage % devices)) is not None}
        equal = [stage for stage in stages if stage not in given]
        shared = blocks + self.counts_embedding + self.counts_head - sum(given.values())
        each = uniform_partition(shared, len(equal)) if equal else ()
        if each is None:
            return None
        counts = given | dict(zip(equal, each, strict=True))
        counts[0] += 1 - self.counts_embedding
        counts[stages[-1]] += 1 - self.counts_head
        return tuple(counts[stage] for stage in stages) if min(counts.values()) > 0 else None


EQUAL_BLOCKS = StageSplit()
