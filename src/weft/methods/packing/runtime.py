"""Packed samples in a stage: its blocks attend inside the documents of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from weft.describe.plan import PACKING, Choice
from weft.run.stage.attention import give_documents
from weft.run.stage.stage_module import ChangedStageOf, StageModule


def attend_inside(stage: StageModule, layers: Sequence[int], choice: Choice) -> None:
    """Let all blocks of a stage attend inside the documents that the stage is told of."""
    for block in stage.blocks:
        give_documents(block)


PARTS = (ChangedStageOf(method=PACKING, change=attend_inside),)
