"""Laws: a stage cut where its tensor ranks exchange computes what the whole one does, part by part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from segment_runs import borders_of, in_segments, whole
from small_plans import divisible
from thread_group import ThreadGroup, in_groups

from weft.methods.tensor_collectives.kinds import TENSOR_BACKWARD, TENSOR_FORWARD
from weft.run.stage.build import build_stage
from weft.run.stage.tensor_pieces import TensorCut

RANKS, SAMPLES = 2, 4


def tensor_segments(stage: Any, given: torch.Tensor, group: ThreadGroup, *, splits: bool) -> torch.Tensor:
    cut = TensorCut(stage)
    there, back = (
        borders_of([kind for one in cut.borders if getattr(one, way)])
        for kind, way in ((TENSOR_FORWARD, "forward"), (TENSOR_BACKWARD, "backward"))
    )
    return in_segments(cut, given, group, there, back, splits=splits)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("first", [0, 2], ids=["begins", "ends"])
@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_a_stage_in_segments_computes_what_the_whole_one_does(family: str, first: int, splits: bool) -> None:
    config = divisible(family)
    drawn = torch.Generator().manual_seed(5)
    tokens = torch.randint(19, (SAMPLES, 8), generator=drawn)
    stream = torch.randn(SAMPLES, 8 // RANKS, config.hidden, dtype=torch.float64, generator=drawn)

    def on_rank(group: ThreadGroup) -> list[list[torch.Tensor | None]]:
        found = []
        for cuts in (False, True):
            stage: Any = build_stage(
                config, range(first, first + 2), 3, torch.float64, tensor_share=(group.place, RANKS)
            )
            stage.tensor.connect(group)
            given = stream.clone().requires_grad_() if first else tokens
            output = tensor_segments(stage, given, group, splits=splits) if cuts else whole(stage, given)
            found.append([output, given.grad, *(one.grad for one in stage.parameters())])
        return found

    for one, two in in_groups(RANKS, on_rank):
        for ours, theirs in zip(two, one, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
