"""Laws of predicted peaks: what more of something needs, for transformers of both kinds and their kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from predict.cost.machines import MODEL
from predict.cost.steps import machine, step_of
from predict.plans import plan_of

from weft.describe.families import layer_graph
from weft.describe.kernels import Attention, Kernels, Norm, with_kernels
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.loss_choice import Loss, loss_choices
from weft.describe.plan import RECOMPUTES, Plan, Recompute, Sharding
from weft.planning.compile import compile_plan
from weft.predict.cost.memory import SHARDINGS, with_slack
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import held_bytes

LLAMA = replace(MODEL, name="small-llama", family="llama", layers=6, feed_forward=192)
GPT = replace(MODEL, layers=6)
# Several stages have a copy of a tied table.
TIED = replace(GPT, name="small-tied", tied_embeddings=True)
BERT = replace(MODEL, name="small-bert", family="bert", layers=6)
MODELS = (GPT, TIED, LLAMA, BERT)
SEQUENCES = (8, 16, 32, 64)
# A node, so that eight tensor ranks find a place.
WIDE = machine(nodes=3, devices=8)

models = st.sampled_from(MODELS)
losses = st.sampled_from(["whole", "chunked"])
kernel_choices = st.builds(
    Kernels,
    attention=st.sampled_from(get_args(Attention)),
    norm=st.sampled_from(get_args(Norm)),
    sequence_parallel=st.booleans(),
    loss_parallel=st.booleans(),
)


def planned(
    graph: LayerGraph,
    *,
    recompute: Recompute = "none",
    sharding: Sharding = "zero-0",
    loss: Loss = "whole",
    **shape: int,
) -> Plan:
    """`shape` as `plan_of` takes it; a chunk has few tokens."""
    plan = plan_of(graph, WIDE, **shape)  # type: ignore[arg-type]
    stages = tuple(stage.model_copy(update={"recompute": recompute}) for stage in plan.stages)
    tokens = 8 if loss == "chunked" else None
    layout = Layout(
        pp=1, dp=1, loops=1, micro_batch_size=1, schedule="1f1b", loss=loss, loss_chunk_tokens=tokens
    )
    choices = loss_choices(layout, len(graph.layers) - 1)
    return plan.model_copy(update={"stages": stages, "sharding": sharding, "layer_choices": choices})


def peaks(graph: LayerGraph, **shape: Any) -> tuple[int, ...]:
    """Of every rank, and the upper ends of their intervals; `shape` as `planned` takes it."""
    prediction = step_of(planned(graph, **shape), WIDE, graph).prediction
    return (*prediction.peak_bytes, *prediction.peak_high_bytes)


def rises(sizes: list[tuple[int, ...]]) -> bool:
    return all(low <= high for few, many in pairwise(sizes) for low, high in zip(few, many, strict=True))


def grows(sizes: list[tuple[int, ...]]) -> bool:
    """True if no rank's peak falls, and some rank's rises at every step."""
    return rises(sizes) and all(low != high for low, high in pairwise(sizes))


@settings(max_examples=6)
@given(
    models,
    kernel_choices,
    st.sampled_from(["mbs", "sequence", "vocabulary"]),
    st.sampled_from(RECOMPUTES),
    losses,
)
def test_more_of_a_sample_needs_more(
    model, kernels: Kernels, what: str, recompute: Recompute, loss: Loss
) -> None:
    sizes = []
    for more in (1, 2, 3):
        config = replace(
            model,
            sequence=SEQUENCES[more] if what == "sequence" else model.sequence,
            vocabulary=128 * more if what == "vocabulary" else model.vocabulary,
        )
        graph = with_kernels(layer_graph(config), config, kernels)
        size = more if what == "mbs" else 1
        sizes.append(peaks(graph, recompute=recompute, loss=loss, pp=2, tp=2, micro_batch_size=size))
    assert grows(sizes)


@settings(max_examples=6)
@given(models, st.sampled_from(RECOMPUTES), st.sampled_from(["zero-0", "zero-3"]), losses)
def test_more_layers_need_more(model, recompute: Recompute, sharding: Sharding, loss: Loss) -> None:
    graphs = [layer_graph(replace(model, layers=layers)) for layers in (4, 6, 8)]
    assert grows(
        [peaks(graph, recompute=recompute, sharding=sharding, loss=loss, pp=2, dp=2) for graph in graphs]
    )


@settings(max_examples=6)
@given(models, kernel_choices, st.sampled_from(RECOMPUTES), losses)
def test_more_tensor_ranks_need_less_each(model, kernels: Kernels, recompute: Recompute, loss: Loss) -> None:
    graph = with_kernels(layer_graph(model), model, kernels)
    sizes = [peaks(graph, recompute=recompute, loss=loss, pp=2, tp=tensor)[::tensor] for tensor in (4, 2, 1)]
    assert rises(sizes)


@settings(max_examples=6)
@given(models, kernel_choices, st.sampled_from(RECOMPUTES))
def test_more_stages_need_less_but_for_the_last(model, kernels: Kernels, recompute: Recompute) -> None:
    """The first stage's: it has as many micro-batches under way as there are stages."""
    graph = with_kernels(layer_graph(model), model, kernels)
    first = [peaks(graph, recompute=recompute, pp=stages, micro_batches=8)[:1] for stages in (4, 2, 1)]
    assert rises(first)


@settings(max_examples=6)
@given(models, st.sampled_from(SHARDINGS))
def test_more_replicas_need_no_more_each(model, sharding: Sharding) -> None:
    sizes = [peaks(layer_graph(model), sharding=sharding, pp=2, dp=dp)[:2] for dp in (4, 3, 2)]
    assert rises(sizes)


@settings(max_examples=6)
@given(models, losses, st.sampled_from([2, 3, 5]), st.sampled_from([1, 2]))
def test_sharding_more_adds_buffers_only(model, loss: Loss, dp: int, pp: int) -> None:
    """Without the buffers of gathered weights and of gradients, each level needs less than the one before."""
    graph, sizes = layer_graph(model), []
    for sharding in SHARDINGS:
        plan = planned(graph, sharding=sharding, loss=loss, pp=pp, dp=dp, schedule="gpipe")
        program, cost_model = compile_plan(plan, graph), CostModel(graph=graph, cluster=WIDE)
        placed = PlacedPlan(program=program, plan=plan, model=cost_model.of(plan))
        held = held_bytes(Pricing(program=program, placed=placed))
        buffers = with_slack(held["buffers"].parts["sharding_buffers"])
        sizes.append(tuple((np.array(step_of(plan, WIDE, graph).prediction.peak_bytes) - buffers).tolist()))
        assert (buffers > 0).all() == (sharding in ("zero-2", "zero-3"))
    assert rises(sizes[::-1])
    assert all(less < more for less, more in zip(sizes[-1], sizes[0], strict=True))


@settings(max_examples=6)
@given(models, kernel_choices, st.integers(1, 2), st.sampled_from(["1f1b", "gpipe"]), losses)
def test_recomputing_more_needs_no_more(
    model, kernels: Kernels, stages: int, schedule: str, loss: Loss
) -> None:
    """Of scores that are stored, and of weft's own kernels; others' flash attention has nothing to drop."""
    graph = layer_graph(model)
    if not kernels.attention.startswith("flash"):
        graph = with_kernels(graph, model, kernels)
    sizes = [
        peaks(graph, recompute=recompute, loss=loss, pp=stages, tp=2, schedule=schedule)
        for recompute in ("full", "selective", "none")
    ]
    assert rises(sizes)


@settings(max_examples=6)
@given(models, kernel_choices, st.sampled_from(RECOMPUTES), st.sampled_from([2, 4]))
def test_divided_tokens_need_no_more(model, kernels: Kernels, recompute: Recompute, tensor: int) -> None:
    sizes = [
        peaks(
            with_kernels(layer_graph(model), model, replace(kernels, sequence_parallel=divided)),
            recompute=recompute,
            pp=2,
            tp=tensor,
        )
        for divided in (True, False)
    ]
    assert rises(sizes)
