"""The predicted peak of a step is the one that torch tracks over fake tensors of the real modules."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tracked import FOREACH, TrackedStep, predicted, tracked
from tracked_memory import MODELS, SHAPES, TARGET, resized

from weft.describe.convolutional_models import convolutional_config
from weft.describe.plan import RECOMPUTES, Recompute
from weft.methods.expert_exchanges.program import WAYS

SMALL = {"hidden": 128, "heads": 4, "key_value_heads": 4, "layers": 2, "feed_forward": 384}
TINY = {name: replace(MODELS[name], **SMALL) for name in ("gpt", "llama", "bert", "vit")}
MIXTRAL = resized(MODELS["mixtral"], vocabulary=256, hidden=128)
SMALL_RESNET = convolutional_config(
    "tracked",
    family="resnet",
    channels=3,
    vocabulary=16,
    hidden=64,
    widths=(128,),
    depths=(2,),
    image_size=64,
)
LONG, MANY = ({**sizes} for sizes in SHAPES.values())
ROWS = [
    TrackedStep(model=TINY["gpt"], optimizer="sgd"),
    TrackedStep(model=replace(TINY["gpt"], **MANY), precision="bf16", recompute="selective"),
    TrackedStep(model=replace(TINY["gpt"], **LONG), precision="bf16", tensor_parallel=4),
    TrackedStep(model=replace(TINY["llama"], **LONG), recompute="selective"),
    TrackedStep(model=TINY["llama"], precision="bf16", recompute="full", tensor_parallel=2),
    # The optimizer's step decides.
    TrackedStep(model=replace(TINY["gpt"], sequence=16), micro_batch_size=1, optimizer=FOREACH),
    TrackedStep(model=resized(MIXTRAL, **LONG), precision="bf16"),
    TrackedStep(model=resized(MIXTRAL, **LONG), precision="bf16", tensor_parallel=2, recompute="full"),
    TrackedStep(model=MIXTRAL, precision="bf16", recompute="selective", optimizer="sgd"),
    TrackedStep(model=TINY["bert"], recompute="full"),
    TrackedStep(model=replace(TINY["gpt"], **MANY), precision="bf16", loss="chunked"),
    TrackedStep(
        model=TINY["llama"],
        loss="chunked",
        tensor_parallel=2,
        recompute="full",
    ),
    # Without logits, the norm in fp32 decides.
    TrackedStep(model=replace(TINY["llama"], **LONG), precision="bf16", loss="chunked"),
    TrackedStep(model=TINY["bert"], loss="chunked", recompute="selective"),
    TrackedStep(model=TINY["vit"], precision="bf16"),
    TrackedStep(model=MODELS["resnet"]),
    # The last of two stages, whose copy of the token table is shared out with the rest of it.
    *(
        TrackedStep(
            model=replace(TINY["gpt"], tied_embeddings=True),
            precision=precision,
            stages=2,
            replicas=4,
            sharding=level,
        )
        for precision, level in (("fp32", "zero-1"), ("bf16", "zero-2"), ("bf16", "zero-3"))
    ),
]


# Rows of experts lie at borders of segments, and are not made again.
IN_SEGMENTS = [
    TrackedStep(
        model=resized(MODELS["mixtral"], vocabulary=256, sequence=1024),
        precision="bf16",
        recompute=recompute,
        expert_parallel=2,
        exchanges=exchanges,
    )
    for recompute in RECOMPUTES
    for exchanges in WAYS[:2]
]


def words(step: TrackedStep) -> str:
    degrees = f"pp {step.stages} tp {step.tensor_parallel} {step.sharding}"
    return f"{step.model.family} {step.precision} {step.recompute} {degrees} {step.loss}"


@pytest.mark.parametrize("step", ROWS, ids=words)
def test_the_predicted_peak_is_the_tracked_one(step: TrackedStep) -> None:
    found = tracked(step)
    assert found.resident_bytes < found.peak_bytes
    assert predicted(step).peak_bytes == pytest.approx(found.peak_bytes, rel=TARGET)


# A moment that an earlier model of memory left out, or counted twice, decides each of them.
MOMENTS = {
    "a shortcut's gradient waits for the branch": TrackedStep(
        model=SMALL_RESNET, micro_batch_size=2, optimizer="sgd"
    ),
    "a block of convolutions runs again": TrackedStep(model=SMALL_RESNET, recompute="full"),
    "a norm has freed its input": TrackedStep(model=replace(TINY["bert"], **LONG), recompute="full"),
    "a product is scattered again": TrackedStep(
        model=replace(TINY["bert"], **LONG), recompute="full", tensor_parallel=4
    ),
    "a head's product makes two gradients": TrackedStep(
        model=replace(TINY["bert"], vocabulary=256, sequence=1024), tensor_parallel=4
    ),
    "the gradient of a tied matrix waits for the embedding": TrackedStep(
        model=replace(TINY["gpt"], tied_embeddings=True, hidden=256, feed_forward=1024, sequence=1024),
        precision="bf16",
        recompute="full",
        loss="chunked",
    ),
    "one room for the logits of all chunks": TrackedStep(
        model=replace(TINY["gpt"], **MANY), precision="bf16", loss="fused"
    ),
}


@pytest.mark.parametrize("step", MOMENTS.values(), ids=[*MOMENTS])
def test_the_moment_of_the_peak_is_known(step: TrackedStep) -> None:
    assert predicted(step).peak_bytes == pytest.approx(tracked(step).peak_bytes, rel=0.01)


def test_a_chunked_loss_has_the_vectors_beside_their_gradients() -> None:
    model = replace(TINY["gpt"], hidden=256, sequence=512)
    step = TrackedStep(model=model, precision="bf16", recompute="full", tensor_parallel=4, loss="chunked")
    assert predicted(step).peak_bytes == pytest.approx(tracked(step).peak_bytes, rel=0.01)


def test_a_recomputed_layer_runs_after_its_gradient_is_gathered() -> None:
    model = replace(TINY["gpt"], heads=8, key_value_heads=8, **LONG)
    step = TrackedStep(model=model, recompute="full", tensor_parallel=8)
    assert predicted(step).peak_bytes == pytest.approx(tracked(step).peak_bytes, rel=0.03)


@pytest.mark.parametrize("step", IN_SEGMENTS, ids=lambda step: f"{step.recompute} {step.exchanges}")
def test_each_row_of_an_expert_is_counted_once(step: TrackedStep) -> None:
    """Without the bytes between steps, which would hide the rows."""
    found, told = tracked(step), predicted(step)
    assert told.resident_bytes == pytest.approx(found.resident_bytes, rel=0.002)
    comes = found.peak_bytes - found.resident_bytes
    assert told.peak_bytes - told.resident_bytes == pytest.approx(comes, rel=TARGET)


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_tensor_rank_has_the_sums_of_all_tokens_beside_its_part_of_the_stream(recompute: Recompute) -> None:
    """Of two mixtures more."""
    fewer, more = (
        TrackedStep(
            model=resized(MODELS["mixtral"], vocabulary=256, sequence=1024, layers=layers),
            precision="bf16",
            recompute=recompute,
            tensor_parallel=2,
            expert_parallel=2,
            exchanges="instructions",
        )
        for layers in (3, 5)
    )
    foretold, comes = (
        find(more).peak_bytes
        - find(more).resident_bytes
        - find(fewer).peak_bytes
        + find(fewer).resident_bytes
        for find in map(cache, (predicted, tracked))
    )
    assert foretold == pytest.approx(comes, rel=0.015)
