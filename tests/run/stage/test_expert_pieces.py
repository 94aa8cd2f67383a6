"""Laws: a stage cut around its experts computes and sends what the whole one does, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoder_models import tiny_decoder
from segment_runs import borders_of, in_segments, whole
from thread_group import ThreadGroup, in_groups

from weft.describe.decoder_row import ROWS
from weft.methods.expert_exchanges.kinds import EXPERT_COMBINE, EXPERT_DISPATCH
from weft.run.stage.build import build_stage
from weft.run.stage.expert_pieces import ExpertCut

# Without those whose blocks are not cut: linear attention, and experts beside a feed-forward.
MIXTURES = sorted(
    name
    for name, row in ROWS.items()
    if row.trained and row.experts and not row.experts.beside and row.linear is None
)
RANKS, SAMPLES = 2, 4


def expert_segments(stage: Any, tokens: torch.Tensor, group: ThreadGroup, *, splits: bool) -> torch.Tensor:
    """The stage with a border wherever its cut has one, in both ways."""
    cut = ExpertCut(stage)
    borders = borders_of((EXPERT_DISPATCH, EXPERT_COMBINE) * (len(cut.borders) // 2))
    return in_segments(cut, tokens, group, borders, borders, splits=splits)


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
            lambda stage: expert_segments(stage, tokens, group, splits=splits),
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
