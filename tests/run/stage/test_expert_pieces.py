"""Laws: a stage cut around its experts computes and sends what the whole one does, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoder_models import tiny_decoder
from thread_group import ThreadGroup, in_groups

from weft.describe.decoder_row import ROWS
from weft.methods.expert_exchanges.kinds import EXPERT_COMBINE, EXPERT_DISPATCH
from weft.program.segments import Border, StageSegments
from weft.run.stage.build import build_stage
from weft.run.stage.expert_pieces import ExpertCut
from weft.run.stage.pieces import Tape
from weft.run.stage.segments import StageRun

# Without those whose blocks are not cut: linear attention, and experts beside a feed-forward.
MIXTURES = sorted(
    name
    for name, row in ROWS.items()
    if row.trained and row.experts and not row.experts.beside and row.linear is None
)
RANKS, SAMPLES = 2, 4


def whole(stage: Any, tokens: torch.Tensor) -> torch.Tensor:
    output = stage(tokens)
    output.pow(2).sum().backward()
    return output.detach()


def in_segments(
    stage: Any, tokens: torch.Tensor, group: ThreadGroup, *, splits: bool = False
) -> torch.Tensor:
    """The stage in segments, with a border wherever its cut has one; `splits`: weight parts come last."""
    cut = ExpertCut(stage)
    kinds = (EXPERT_DISPATCH, EXPERT_COMBINE) * (len(cut.borders) // 2)
    borders = tuple(Border(kind=kind, bytes=0, most_bytes=0) for kind in kinds)
    run = StageRun(
        0, cut, StageSegments(forward=borders, backward=borders, split=(False,) * (len(borders) + 1))
    )
    tape, value = Tape(), tokens
    run.begin(tape, tokens)
    for segment in range(len(borders) + 1):
        entered = value if segment == 0 else value.detach().requires_grad_()
        value = run.run(tape, segment, entered)
        if segment < len(borders):
            value = run.cross(tape, segment, value, group, backward=False)
    gradient: Any = 2.0 * value
    parts: list[Any] = []
    for segment in range(len(borders), -1, -1):
        gradient, left = run.go_back(tape, segment, gradient, splits=splits)
        parts += left
        if segment > 0:
            gradient = run.cross(tape, segment - 1, gradient, group, backward=True)
    assert bool(parts) == splits
    for part in parts:
        part.run()
    return value


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_stage_in_segments_computes_and_sends_what_the_whole_one_does(
    model_type: str, splits: bool
) -> None:
    config = tiny_decoder(model_type, vocab_size=19, max_position_embeddings=8)
    tokens = torch.randint(19, (SAMPLES, 8), generator=torch.Generator().manual_seed(5))

    def on_rank(group: ThreadGroup) -> list[tuple[dict[str, int], list[torch.Tensor | None]]]:
        found = []
        for run in (
            lambda stage: whole(stage, tokens),
            lambda stage: in_segments(stage, tokens, group, splits=splits),
        ):
            stage: Any = build_stage(
                config, range(config.layers + 2), 3, torch.float64, expert_share=(group.place, RANKS)
            )
            stage.expert.connect(group)
            assert len(stage.experts())
            before = dict(group.sent_bytes)
            tensors = [run(stage), *(one.grad for one in stage.parameters())]
            sent = {name: size - before.get(name, 0) for name, size in group.sent_bytes.items()}
            found.append((sent, tensors))
        return found

    for (sent, one), (sent_in_segments, two) in in_groups(RANKS, on_rank):
        # Of counts, too: they are gathered once.
        assert sent_in_segments == sent
        for ours, theirs in zip(two, one, strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)
