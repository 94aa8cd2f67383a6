"""Rows whose replicas compress both ways: one process keeps all errors and encodes the same pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import convolutional_jobs
import torch
from equality_table import Row
from methods.rows.gradient_norm import Clips
from one_process import Copy, Method
from small_jobs import SEED
from small_plans import divisible, tiny
from thread_group import ThreadGroup, in_groups
from torch import nn

from weft.describe.families import layer_graph
from weft.describe.plan import Choice
from weft.methods.clan.options import NAME, ClanOptions
from weft.methods.clan.runtime.exchange import TwoWaySums
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage
from weft.run.state.bucket import FlatLayout
from weft.run.state.synchroniser_state import SYNCHRONISER
from weft.sync.base import Meeting, ParameterPlace


def exchange(
    one: TwoWaySums, gradient: torch.Tensor, pieces: int, meeting: Meeting
) -> None:
    """All that a rank does with a stage's gradient in a step."""
    from dataclasses import replace
    for part in range(pieces):
        own = replace(meeting, part=part)
        one.compress(gradient, own)
        one.push(own)
        one.aggregate(gradient, own)
        one.pull(own)
        one.decompress(gradient, own)
    one.reduce(gradient, meeting)


@dataclass(frozen=True)
class Identity(Method):
    """All numbers of all blocks, sent as they are: dense training."""

    sync = Choice(name=NAME, options={"codec": "top-k", "ratio": 1.0, "block": 64, "minimum_bytes": 512, "piece_bytes": 2048})

    def check(self, runtime: RankRuntime) -> None:
        kinds = [one.kind.name for one in runtime.program.instructions()]
        assert kinds.count("decompress") > 1


GPT, WIDE = tiny(layers=2), divisible("gpt")
ROWS = (
    Row(GPT, dp=2, micro_batches=2, same_bits=True, methods=(Identity(),)),
)
