"""Laws: a stage cut around its experts computes and sends what the whole one does, to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from cut_programs import cluster, cut_by
from decoder_models import tiny_decoder
from equality_table import Row
from segment_runs import borders_of, in_segments, whole
from small_plans import make_program
from thread_group import ThreadGroup, group_of, in_threads

from weft.describe.decoder_row import ROWS
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.methods.expert_exchanges.kinds import EXPERT_COMBINE, EXPERT_DISPATCH
from weft.methods.expert_exchanges.program import NAME
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.pricing import Pricing
from weft.run.stage.build import build_stage
from weft.run.stage.expert_pieces import ExpertCut

# Without those whose blocks are not cut: linear attention, and experts beside a feed-forward.
MIXTURES = sorted(
    name
    for name, row in ROWS.items()
    if row.trained and row.experts and not row.experts.beside and row.linear is None
)
RANKS, SAMPLES = 2, 4
# With the axis of ranks beside those of experts.
CASES = [(name, None) for name in MIXTURES]
CASES += [(name, "tensor") for name in ("mixtral", "qwen2_moe", "glm4_moe", "deepseek_v2")]
CASES += [(name, "context") for name in ("mixtral", "qwen2_moe")]


def expert_segments(stage: Any, tokens: torch.Tensor, group: ThreadGroup, *, splits: bool) -> torch.Tensor:
    """The stage with a border wherever its cut has one, in both ways."""
    cut = ExpertCut(stage)
    borders = borders_of((EXPERT_DISPATCH, EXPERT_COMBINE) * (len(cut.borders) // 2))
    return in_segments(cut, tokens, group, borders, borders, splits=splits)


def grid(beside: int) -> list[tuple[ThreadGroup, ThreadGroup]]:
    """The places of ranks: in a group of expert ranks, and in one of so many others beside each of them."""
    experts, others = [group_of(RANKS) for _ in range(beside)], [group_of(beside) for _ in range(RANKS)]
    places = product(range(RANKS), range(beside))
    return [(experts[other][place], others[place][other]) for place, other in places]


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize(("model_type", "axis"), CASES)
def test_a_stage_in_segments_computes_and_sends_what_the_whole_one_does(
    model_type: str, axis: str | None, splits: bool
) -> None:
    """Ranks of other axes exchange inside of its pieces."""
    config = tiny_decoder(model_type, vocab_size=19, max_position_embeddings=8)
    tokens = torch.randint(19, (SAMPLES, 8), generator=torch.Generator().manual_seed(5))

    def on_rank(groups: tuple[ThreadGroup, ThreadGroup]) -> list[tuple[Any, list[torch.Tensor | None]]]:
        found = []
        experts, others = groups
        for run in (
            lambda stage: whole(stage, tokens),
            lambda stage: expert_segments(stage, tokens, experts, splits=splits),
        ):
            shares: Any = {} if axis is None else {f"{axis}_share": (others.place, others.size)}
            stage: Any = build_stage(
                config,
                range(config.layers + 2),
                3,
                torch.float64,
                expert_share=(experts.place, RANKS),
                **shares,
            )
            stage.expert.connect(experts)
            if axis is not None:
                getattr(stage, axis).connect(others)
            assert len(stage.experts())
            before = [Counter(one.sent_bytes) for one in groups]
            tensors = [run(stage), *(one.grad for one in stage.parameters())]
            sent = [Counter(one.sent_bytes) - had for one, had in zip(groups, before, strict=True)]
            found.append((sent, tensors))
        return found

    for (sent, one), (sent_in_segments, two) in in_threads(on_rank, grid(1 if axis is None else 2)):
        # Of counts, too: they are gathered once.
        assert sent_in_segments == sent
        for ours, theirs in zip(two, one, strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def moved_in_segments(config: ModelConfig) -> list[int]:
    """Bytes that a tensor rank's exchanges move in blocks, from border to border, there and back."""

    def on_rank(groups: tuple[ThreadGroup, ThreadGroup]) -> list[int]:
        experts, others = groups
        shares = {"expert_share": (experts.place, RANKS), "tensor_share": (others.place, others.size)}
        stage: Any = build_stage(config, range(1, config.layers + 1), 3, torch.float64, **shares)
        stage.expert.connect(experts)
        stage.tensor.connect(others)
        moved, send = [0], experts.all_to_all_rows

        def counted(exchange: Callable[[torch.Tensor], torch.Tensor], times: int) -> Any:
            def count(value: torch.Tensor) -> torch.Tensor:
                moved[-1] += times * value.nbytes
                return exchange(value)

            return count

        def crossed(*rows: Any) -> None:
            moved.append(0)
            send(*rows)

        # A sum is a scatter and a gather.
        for name, times in (("gather", others.size), ("scatter_sum", 1), ("add_up", 2)):
            setattr(stage.tensor, name, counted(getattr(stage.tensor, name), times))
        experts.all_to_all_rows = crossed  # type: ignore[method-assign]
        stream = torch.randn(stage.input_shape(SAMPLES, config.sequence), dtype=torch.float64)
        expert_segments(stage, stream.requires_grad_(), experts, splits=False)
        return moved

    first, *others = in_threads(on_rank, grid(2))
    assert others == [first] * 3
    return list(first)


@pytest.mark.parametrize("sequence", [8, 7], ids=["divided", "whole"])
def test_tensor_exchanges_are_predicted_in_the_segments_that_have_them(sequence: int) -> None:
    config = tiny_decoder("mixtral", num_hidden_layers=2, vocab_size=19, max_position_embeddings=sequence)
    row = Row(config, "1f1b", pp=3, tp=2, ep=2, micro_batch_size=SAMPLES, layers=(1, 2, 1))
    plan = cut_by(row.plan, name=NAME, way="instructions")
    program = make_program(config, plan)
    model = CostModel(graph=layer_graph(config), cluster=cluster(0))
    pricing = Pricing(program=program, placed=PlacedPlan(program=program, plan=plan, model=model))
    there = [pricing.exchanges_of("forward_segment", 1, 0, part).forward_s for part in range(5)]
    back = [pricing.exchanges_of("backward_segment", 1, 0, part).backward_s for part in range(4, -1, -1)]
    moved = moved_in_segments(config)
    # Each segment there, the last one with the first one back, and each one back.
    assert len(moved) == 9
    seconds = [*there[:-1], there[-1] + back[0], *back[1:]]
    assert sum(seconds) > 0.0
    assert [one / sum(seconds) for one in seconds] == pytest.approx([one / sum(moved) for one in moved])
