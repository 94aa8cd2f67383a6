"""GPipe in rounds of some micro-batches, with a card that promises less than it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from weft.describe.contract import Contract
from weft.program.arrays import Ints
from weft.program.kinds import BACKWARD, FORWARD
from weft.program.schedules.base import ComputeOrder, Options, Pipeline


class InTwos:
    """One stage per device; forwards and backwards of `together` micro-batches in turn."""

    name: ClassVar[str] = "in-twos"
    synonyms: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Mapping[str, str]] = {"together": "micro-batches of a round; 2 unless given"}
    searched: ClassVar[Sequence[Options]] = ({}, {"together": 4})
    contract: ClassVar[Contract] = Contract.UNBIASED

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        together = int(options.get("together", 2))
        if pipeline.stages != pipeline.devices:
            return f"in-twos runs one stage per device, not {pipeline.stages} on {pipeline.devices}"
        # Powers of two only, so that shorter pipelines say nothing of longer ones.
        count = pipeline.micro_batches
        if count % together or count & (count - 1):
            return f"in-twos does not run {count} micro-batches, {together} together"
        return None

    def placement(self, pipeline: Pipeline) -> Ints:
        return np.arange(pipeline.stages, dtype=np.int64)

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        together = int(options.get("together", 2))
        rounds = np.arange(pipeline.micro_batches, dtype=np.int64).reshape(-1, together)
        kinds = np.repeat(np.array([FORWARD, BACKWARD], dtype=np.int64), together)
        return ComputeOrder(
            kind=np.tile(kinds, len(rounds)),
            stage=np.full(2 * pipeline.micro_batches, device, dtype=np.int64),
            micro_batch=np.tile(rounds, 2).ravel(),
        )
