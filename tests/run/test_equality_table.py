"""Law: every row of the equality table trains like one process.

Rows of methods stand in `tests/methods/rows/`; those in which every two choices of a plan meet come from
`tests/equality_cases.py`. `tests/equality_cover.py` chooses the rows that `make test` trains.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import convolutional_jobs
import equality_table
import pytest
import torch
from decoder_models import tiny_decoder
from equality_cases import CHOICES, cases, choices_of, pairs
from equality_cover import AXES, covering, marks, size, traits
from equality_table import Row, differences, together, tolerance_of, train, train_late
from methods.rows.diloco import StepsOutside
from methods.rows.gradient_norm import Clips
from methods.rows.sharding import ACROSS, PARTS, SAME_BITS, by_layout
from methods.rows.tensor_collectives import Collectives
from mutants.mutations import mutations, rooms
from one_process import Outcome, Training, alone
from pool import WorkerPool
from small_plans import divisible, make_program, tiny

from weft.describe.models import resolve_model
from weft.methods.sharding.kinds import REDUCE, REDUCE_ACROSS
from weft.program.verify import require_valid

GPT, LLAMA, RESNET = tiny(), tiny("llama"), convolutional_jobs.tiny("resnet")
WIDE_GPT, WIDE_LLAMA, WIDE_BERT = (divisible(family) for family in ("gpt", "llama", "bert"))
DIAMOND, INTERLEAVED, TWO_STEMS, IMAGES, TEXT = (
    resolve_model(f"own_models:{name}") for name in ("diamond", "interleaved", "two_stems", "images", "text")
)

BITS = partial(Row, precision="fp32", same_bits=True)
PIPELINES = (
    *(BITS(GPT, schedule, pp=pp) for schedule in ("gpipe", "1f1b", "breadth-first") for pp in (2, 4)),
    BITS(GPT, "breadth-first", pp=2, loops=2),
    BITS(GPT, "breadth-first", pp=2, loops=4, micro_batches=3),
    BITS(GPT, "breadth-first", pp=2, loops=3, micro_batches=1),
    BITS(GPT, "breadth-first", pp=3, loops=2, micro_batches=2),
    BITS(GPT, "depth-first", pp=2, loops=2),
    BITS(GPT, "depth-first", pp=2, loops=3, micro_batches=2),
    BITS(GPT, "depth-first", pp=3, loops=2, micro_batches=3),
    BITS(GPT, "hybrid", pp=2, loops=2),
    BITS(GPT, "zb-h1", pp=3, micro_batches=2),
    BITS(GPT, "zb-h1", pp=4),
    BITS(GPT, "zb-v", loops=2, micro_batches=3),
    BITS(GPT, "zb-v", pp=3, loops=2),
    # Fewer micro-batches than devices.
    BITS(LLAMA, "gpipe", pp=4, micro_batches=2),
    BITS(LLAMA, "1f1b", pp=4, micro_batches=2),
    # bf16 on one rank: masters in fp32.
    BITS(GPT, precision="bf16", optimizer="adamw", steps=3),
    Row(LLAMA, "breadth-first", pp=2, dp=2, loops=2),
    # Two paths, whose devices hold two stages each.
    Row(GPT, "chimera", pp=2, micro_batches=6),
    Row(GPT, "chimera", pp=4),
    Row(LLAMA, "chimera", pp=2, dp=2, micro_batches=2),
)

DEGREES = (
    Row(WIDE_LLAMA, "1f1b", pp=2, degrees=(2, 1)),
    Row(divisible("llama", heads=4), "gpipe", pp=3, degrees=(1, 4, 2), splits=(2, 1, 1)),
    Row(WIDE_GPT, "1f1b", pp=2, dp=2, degrees=(1, 2), sharding="zero-1", methods=(Clips(0.2),)),
    Row(WIDE_LLAMA, "zb-h1", pp=2, dp=2, degrees=(2, 1), sharding="zero-2"),
    Row(WIDE_GPT, "gpipe", pp=2, dp=2, degrees=(2, 1), sharding="zero-3", recompute="full"),
    Row(WIDE_LLAMA, "1f1b", pp=2, copies=(2, 1), degrees=(1, 2), cp=2),
    Row(WIDE_BERT, "1f1b", pp=2, degrees=(1, 2), transport="device"),
    Row(WIDE_LLAMA, "1f1b", dp=2, unlike=((2,), (1,)), shares=(5, 3)),
    Row(divisible("llama", heads=4), "gpipe", dp=3, unlike=((4,), (1,), (2,)), loss=""),
    Row(WIDE_GPT, "1f1b", pp=2, dp=2, unlike=((2, 1), (1, 2)), methods=(Clips(0.2),), evaluates=True),
)

UNEVEN = (
    Row(GPT, dp=3, shares=(1, 4, 2)),
    Row(GPT, "1f1b", pp=2, dp=2, shares=(5, 2)),
    Row(GPT, "zb-h1", pp=2, dp=2, shares=(3, 2)),
    Row(LLAMA, "1f1b", pp=2, dp=2, layers=(1, 7), shares=(3, 3)),
    Row(LLAMA, "breadth-first", pp=2, dp=2, loops=2, layers=(4, 1, 1, 2), shares=(2, 2)),
    Row(LLAMA, "depth-first", pp=2, dp=2, loops=2, layers=(3, 1, 2, 2), shares=(2, 4)),
    Row(LLAMA, "gpipe", pp=2, dp=2, layers=(6, 2), shares=(1, 3)),
    *(
        Row(
            model,
            "1f1b",
            **dict(zip(("pp", "dp", "tp"), degrees, strict=True)),
            layers=layers,
            shares=shares,
            devices=devices,
            planned_by=by_layout,
        )
        for model, degrees, layers, shares, devices in (
            (GPT, (2, 2, 1), (5, 3), (3, 1), (2, 0, 3, 1)),
            (WIDE_GPT, (1, 2, 2), (4,), (1, 4), (1, 3, 0, 2)),
            (WIDE_GPT, (2, 1, 2), (1, 3), (3,), (1, 3, 0, 2)),
        )
    ),
)

TENSOR = (
    # Two ranks divide a stream of eight tokens, and not one of seven.
    *(
        Row(divisible(family, sequence=size), tp=2)
        for family in ("gpt", "llama", "bert", "vit")
        for size in (8, 7)
    ),
    Row(divisible("llama", heads=4), tp=4),
    Row(WIDE_GPT, "1f1b", pp=2, tp=2),
    Row(divisible("vit"), "1f1b", pp=2, tp=2),
    Row(WIDE_LLAMA, dp=2, tp=2),
    Row(WIDE_GPT, dp=2, tp=2, sharding="zero-1"),
    Row(WIDE_BERT, "breadth-first", dp=2, tp=2, loops=2, sharding="zero-2"),
    Row(WIDE_LLAMA, "depth-first", dp=2, tp=2, loops=4, sharding="zero-2"),
    Row(WIDE_GPT, "breadth-first", dp=2, tp=2, loops=2, sharding="zero-3"),
    Row(WIDE_LLAMA, "zb-h1", pp=2, tp=2),
    Row(WIDE_GPT, "zb-v", pp=2, tp=2, loops=2),
    Row(WIDE_GPT, "chimera", pp=2, tp=2),
    Row(divisible("gpt", tied=True), tp=2),
    Row(divisible("bert", tied=True), "1f1b", pp=2, tp=2),
    Row(divisible("llama", tied=True), "zb-h1", dp=2, tp=2),
    # The norm counts every element once.
    Row(WIDE_GPT, tp=2, methods=(Clips(0.2),)),
    Row(WIDE_GPT, dp=2, tp=2, methods=(Clips(0.2),)),
    Row(WIDE_GPT, dp=2, tp=2, sharding="zero-1", methods=(Clips(0.2),)),
    # A loss that takes no shares is given all logits.
    Row(WIDE_GPT, tp=2, loss="whole"),
)

LONG = divisible("bert", sequence=16)
TIED = partial(Row, divisible("llama", tied=True), cp=2, methods=(Clips(0.2),))
CONTEXT = (
    *(Row(model, cp=2) for model in (WIDE_GPT, WIDE_LLAMA, WIDE_BERT)),
    *(Row(model, cp=2, loss="own") for model in (WIDE_GPT, WIDE_LLAMA, WIDE_BERT)),
    Row(WIDE_GPT, "1f1b", pp=2, cp=2, recompute="full"),
    Row(WIDE_BERT, "1f1b", pp=2, cp=2, recompute="selective"),
    Row(WIDE_LLAMA, "zb-h1", pp=2, cp=2, recompute="full"),
    Row(WIDE_GPT, "zb-v", pp=2, cp=2, loops=2),
    Row(WIDE_LLAMA, "chimera", pp=2, cp=2, sharding="zero-1"),
    Row(WIDE_GPT, dp=2, cp=2, sharding="zero-1", recompute="selective"),
    Row(WIDE_BERT, dp=2, cp=2, sharding="zero-3"),
    Row(WIDE_LLAMA, "depth-first", dp=2, cp=2, loops=4, sharding="zero-2"),
    Row(WIDE_GPT, "breadth-first", dp=2, cp=2, loops=2, sharding="zero-3"),
    Row(divisible("llama", sequence=16), cp=4),
    Row(LONG, cp=4),
    # Ranks may have more targets than others, or none.
    Row(LONG, cp=4, masks=True),
    Row(LONG, cp=4, masks=True, loss="whole"),
    # Tied embeddings and the norm count once.
    TIED("1f1b", pp=2),
    TIED(dp=2, sharding="zero-1"),
    TIED("breadth-first", dp=2, loops=4, sharding="zero-2"),
)

BOTH = partial(Row, cp=2, tp=2)
CONTEXT_WITH_TENSOR = (
    BOTH(WIDE_GPT),
    BOTH(WIDE_LLAMA, loss="columns"),
    BOTH(WIDE_BERT, loss="own"),
    BOTH(WIDE_GPT, loss="mean"),
    BOTH(divisible("gpt", tied=True), "1f1b", pp=2, recompute="full", methods=(Clips(0.2),)),
    BOTH(WIDE_BERT, "zb-h1", pp=2, recompute="selective", masks=True, methods=(Clips(None),)),
    BOTH(
        divisible("llama", tied=True),
        "breadth-first",
        dp=2,
        loops=4,
        sharding="zero-2",
        methods=(Clips(0.2),),
    ),
    BOTH(WIDE_BERT, dp=2, sharding="zero-3", methods=(Clips(None),)),
    # Three tensor ranks do not divide the four tokens of each context rank.
    Row(replace(WIDE_GPT, hidden=18, heads=3, key_value_heads=3), cp=2, tp=3, micro_batches=2),
)

SMALL_BERT = replace(GPT, name="tiny-bert", family="bert")
SMALL_VIT = replace(divisible("vit"), layers=6)
FAMILIES = tuple(
    Row(model, schedule, pp=2, dp=dp)
    for model in (SMALL_BERT, SMALL_VIT)
    for schedule, dp in (("1f1b", 1), ("zb-h1", 1), ("breadth-first", 2))
) + tuple(Row(model, schedule, pp=2) for model in (IMAGES, TEXT) for schedule in ("1f1b", "zb-h1"))

SMALL_DECODER = partial(tiny_decoder, num_hidden_layers=2, vocab_size=19)
SHORT = partial(SMALL_DECODER, max_position_embeddings=8)
# Experts of 24 columns, of which a token has two of six; the second block of a Qwen model is a plain one.
MIXTRAL = SHORT("mixtral", intermediate_size=24)
SHARED_EXPERTS = SHORT("qwen2_moe", mlp_only_layers=[1])
NEOX = tiny_decoder("gpt_neox", vocab_size=19, max_position_embeddings=8)
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 6,
}
ROUNDED = partial(Row, tolerance=1e-5)
MIXTURES = (
    Row(MIXTRAL, "1f1b", pp=2, dp=2, sharding="zero-2"),
    Row(MIXTRAL, "zb-h1", pp=2, recompute="full"),
    Row(MIXTRAL, "breadth-first", pp=2, loops=2, sharding="zero-3", dp=2),
    Row(MIXTRAL, cp=2),
    Row(SHORT("olmoe"), dp=2, recompute="selective"),
    # Of six experts, each rank has three, or two.
    Row(MIXTRAL, ep=2, chunks=3),
    Row(MIXTRAL, ep=3, micro_batch_size=3, micro_batches=2),
    Row(MIXTRAL, "1f1b", pp=2, ep=2, methods=(Clips(0.2),)),
    Row(SHARED_EXPERTS, dp=2, ep=2, sharding="zero-2", methods=(Clips(0.2),)),
    Row(MIXTRAL, "breadth-first", dp=2, ep=2, loops=2, sharding="zero-3", recompute="full"),
    Row(MIXTRAL, "zb-h1", pp=2, ep=2, evaluates=True),
    # A router's probabilities are in fp32, and so are the parts of their gradients that ranks add up.
    ROUNDED(SHORT("qwen3_moe"), tp=2, methods=(Clips(0.2),)),
    ROUNDED(SHARED_EXPERTS, "1f1b", pp=2, tp=2),
    ROUNDED(MIXTRAL, tp=2, methods=(Collectives("overlapped"),)),
    # Rotated queries and products of routers are in fp32, too.
    ROUNDED(SHORT("deepseek_v2"), tp=2, dp=2),
    ROUNDED(SHORT("deepseek_v3"), "1f1b", pp=2),
    # Ranks divide the experts and the samples, and others the tokens.
    Row(MIXTRAL, cp=2, ep=2, evaluates=True, methods=(Clips(0.2),)),
    Row(SHARED_EXPERTS, "1f1b", pp=2, cp=2, ep=2, recompute="full", masks=True),
    Row(MIXTRAL, "breadth-first", dp=2, cp=2, ep=2, loops=2, sharding="zero-3", optimizer="adamw"),
    ROUNDED(MIXTRAL, tp=2, cp=2, ep=2),
    # Others divide the columns of each expert.
    ROUNDED(MIXTRAL, tp=2, ep=2, evaluates=True, methods=(Clips(0.2),)),
    ROUNDED(SHARED_EXPERTS, tp=2, ep=2, recompute="full"),
    ROUNDED(SHORT("qwen3_moe"), "1f1b", pp=2, tp=2, ep=2),
    ROUNDED(MIXTRAL, "breadth-first", dp=2, tp=2, ep=2, loops=2, sharding="zero-3", methods=(Clips(0.2),)),
    ROUNDED(SHORT("deepseek_v2"), dp=2, tp=2, ep=2, sharding="zero-2"),
    ROUNDED(SHORT("exaone_moe"), tp=2, ep=2),
)
DECODERS = (
    Row(SHORT("mistral", sliding_window=3), "1f1b", pp=2),
    Row(SHORT("cohere"), "zb-h1", pp=2, recompute="full"),
    Row(SHORT("gemma2", sliding_window=3), "1f1b", pp=2),
    Row(NEOX, "breadth-first", pp=2, dp=2, loops=2, sharding="zero-1"),
    # Ranks share the weights of norms of queries and keys, whether they divide the tokens or not.
    Row(SHORT("qwen3"), tp=2, methods=(Clips(0.2),)),
    Row(SMALL_DECODER("qwen3", max_position_embeddings=7), tp=2),
    Row(SMALL_DECODER("gemma2", max_position_embeddings=7, sliding_window=3), "zb-h1", pp=2, tp=2),
    # Norms of Gemma add up the gradients of their weights in fp32, over the tokens and heads of a rank.
    Row(
        SHORT("gemma3_text", sliding_window=3),
        "1f1b",
        pp=2,
        tp=2,
        methods=(Collectives("overlapped"),),
        tolerance=1e-5,
    ),
    Row(SHORT("granite", residual_multiplier=0.5), tp=2, dp=2),
    Row(SHORT("starcoder2"), tp=2, methods=(Collectives("interleaved"),)),
    ROUNDED(SHORT("helium"), "1f1b", pp=2, tp=2),
    Row(SHORT("qwen3"), cp=2, tp=2),
    # The factors of all angles are those of the last position, which one of the ranks has.
    Row(SHORT("phi3", original_max_position_embeddings=6, rope_parameters=LONG_ROPE), "1f1b", pp=2, cp=2),
)

# Statistics and dropout included; whoever evaluates in the middle changes nothing.
SEEN = partial(Row, steps=3, evaluates=True)
VGG, ALEXNET = (convolutional_jobs.tiny(family) for family in ("vgg", "alexnet"))
CONVOLUTIONAL = (
    SEEN(RESNET),
    SEEN(RESNET, "1f1b", pp=2, dp=2, recompute="full"),
    SEEN(RESNET, "1f1b", dp=3),
    SEEN(RESNET, "breadth-first", pp=2, dp=2, loops=2),
    SEEN(RESNET, "zb-v", pp=2, loops=2, recompute="full"),
    SEEN(RESNET, "chimera", pp=2),
    SEEN(convolutional_jobs.tiny("resnet", bottleneck=True), "1f1b", pp=2, dp=2),
    SEEN(RESNET, dp=2, shares=(3, 5)),
    SEEN(RESNET, "1f1b", pp=2, dp=2, sharding="zero-2"),
    SEEN(RESNET, dp=4, micro_batches=2, sharding="zero-1", island=2),
    SEEN(VGG, pp=3),
    SEEN(VGG, "1f1b", pp=2, dp=2, recompute="full"),
    SEEN(ALEXNET, "breadth-first", pp=2, loops=2, recompute="full"),
)

OF_FOUR = partial(Row, pp=4, micro_batches=3, micro_batch_size=4)
FORKED = partial(OF_FOUR, DIAMOND, layers=((0,), (1, 2), (3, 4), (5,)))
TOWERS = partial(OF_FOUR, INTERLEAVED, layers=((0,), (1, 3), (2, 4), (5,)))
CROSSED = partial(OF_FOUR, TWO_STEMS, layers=((0,), (1, 2), (3,), (4,)))
PLACED = partial(Row, DIAMOND, "placed", pp=2, micro_batch_size=4)
GRAPHS = (
    FORKED(),
    FORKED("1f1b", recompute="full"),
    FORKED("zb-h1"),
    FORKED("breadth-first", pp=2, loops=2, recompute="selective"),
    FORKED("1f1b", dp=2, splits=(1, 2, 4, 1)),
    FORKED("zb-h1", splits=(4, 1, 2, 1)),
    CROSSED("1f1b", splits=(1, 2, 1, 1)),
    # Of its second stage, one layer reads samples and leaves the stage by itself.
    CROSSED("zb-h1", recompute="full"),
    OF_FOUR(TWO_STEMS, "1f1b", pp=2, layers=((0, 2), (1, 3, 4)), splits=(2, 1)),
    # Stages whose layers do not follow each other.
    TOWERS("graph-1f1b", micro_batches=5),
    TOWERS("graph-1f1b", pp=2, dp=2, layers=((0, 1, 3), (2, 4, 5)), recompute=("full", "none")),
    # Backwards in two parts, in all stages or in some.
    FORKED("graph-zb-h1", dp=2, recompute="selective"),
    TOWERS("graph-zb-h1", micro_batches=5, whole="0,3"),
    # Stages where the plan puts them, also several of a device that others read in between.
    PLACED(layers=((0,), (1, 2), (3, 4), (5,)), places=(0, 1, 0, 0), micro_batches=5),
    PLACED(layers=((0,), (1,), (2,), (3, 4), (5,)), places=(0, 1, 0, 1, 0), dp=2, sharding="zero-1"),
    PLACED(layers=((0, 1), (3,), (2, 4), (5,)), places=(1, 0, 2, 1), pp=3, recompute="full"),
    replace(
        PLACED(layers=((0,), (1, 2), (3, 4), (5,)), places=(0, 1, 0, 0), micro_batches=5),
        schedule="placed-zb",
    ),
    Row(LLAMA, "placed-zb", pp=2, places=(0, 1, 1, 0), dp=2, sharding="zero-2", recompute="selective"),
    Row(GPT, "placed", pp=2, places=(0, 1, 1, 0), evaluates=True, sharding="zero-3", dp=2),
    # Chains split micro-batches, too, whatever else a plan says.
    Row(GPT, "breadth-first", dp=2, loops=2, sharding="zero-3", splits=(2, 1)),
    Row(WIDE_LLAMA, "1f1b", pp=2, tp=2, splits=(1, 2), methods=(Clips(0.2),)),
    Row(WIDE_GPT, "zb-h1", pp=2, cp=2, recompute="full", splits=(2, 1)),
)

# Stages with unlike numbers of replicas, also in two pipelines, and where no number divides the other.
UNLIKE = (
    Row(GPT, "gpipe", pp=2, copies=(2, 1)),
    Row(LLAMA, "1f1b", pp=3, copies=(1, 2, 4), recompute="selective", methods=(Clips(0.2),)),
    Row(tiny(tied=True), "1f1b", pp=2, copies=(2, 3), micro_batches=6, dropout=0.25),
    Row(WIDE_LLAMA, "gpipe", pp=2, tp=2, copies=(2, 1)),
    SEEN(RESNET, "1f1b", pp=2, dp=2, copies=(1, 2), recompute="full"),
    FORKED("graph-1f1b", micro_batches=2, copies=(1, 2, 1, 1), splits=(1, 2, 2, 1)),
    FORKED("graph-zb-h1", micro_batches=4, copies=(1, 2, 1, 2), whole="0"),
)

MMT, DLRM, UNO, TRANSLATOR, PAIRS = (
    resolve_model(f"{name}-tiny") for name in ("mmt", "dlrm", "candle-uno", "encoder-decoder", "image-text")
)
CONDITIONED = resolve_model("own_models:conditioned")
SIDE_BY_SIDE = partial(Row, MMT, pp=3, layers=((0, 1, 2), (3, 4, 5), (6,)))
TOWERS = (
    SIDE_BY_SIDE("1f1b", evaluates=True),
    SIDE_BY_SIDE("zb-h1", recompute="selective", splits=(2, 1, 1)),
    # The second stage reads the first one's stream, and an input of its own.
    Row(MMT, "1f1b", pp=2, dp=2, layers=((0, 1, 2), (3, 4, 5, 6)), sharding="zero-1", recompute="full"),
    Row(MMT, "breadth-first", dp=2, loops=3, layers=((0, 1, 3), (2, 4), (5, 6)), sharding="zero-3"),
    Row(DLRM, "1f1b", pp=3, layers=((0, 1, 4), (2, 3, 5), (6, 7)), loss="clicks", optimizer="adamw"),
    Row(DLRM, "zb-h1", pp=2, dp=2, layers=((0, 4, 5), (1, 2, 3, 6, 7)), loss="clicks"),
    Row(UNO, "breadth-first", pp=2, dp=2, loops=2, loss="doses", shares=(3, 1)),
    Row(PAIRS, "1f1b", pp=3, layers=((0, 1, 2, 3), (4, 5, 6, 7), (8,)), loss="clicks"),
    # Two stages read the encoder's output.
    Row(TRANSLATOR, "1f1b", pp=3, layers=((0, 1, 2, 3), (4, 5), (6, 7))),
    Row(TRANSLATOR, "zb-h1", pp=2, dp=2, layers=((0, 1, 4), (2, 3, 5, 6, 7)), recompute="full"),
    Row(CONDITIONED, "zb-h1", pp=2, layers=((0, 1), (2, 3)), recompute="full"),
)

BRANCHES, KNOTTED = (resolve_model(f"own_models:captured_{name}") for name in ("branches", "tied"))
CAPTURED = (
    Row(BRANCHES, "1f1b", pp=3, layers=((0, 1), (2, 3, 4), (5, 6))),
    Row(BRANCHES, "zb-h1", pp=2, dp=2, layers=((0, 1, 2), (3, 4, 5, 6)), recompute="full", sharding="zero-1"),
    # One of its weights is in two stages, and another in all of them.
    Row(KNOTTED, "1f1b", pp=3, layers=((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))),
    Row(KNOTTED, "1f1b", pp=2, dp=2, layers=((0, 1, 2, 3, 4), (5, 6, 7, 8, 9, 10, 11)), sharding="zero-1"),
)

# Their replicas' sums have an order of their own.
DEVICE = tuple(
    replace(row, transport="device")
    for row in (
        BITS(GPT, "1f1b", pp=4),
        BITS(GPT, "zb-v", pp=3, loops=2),
        Row(LLAMA, "breadth-first", pp=2, dp=2, loops=2),
        Row(GPT, "chimera", pp=4),
        Row(GPT, dp=3, shares=(1, 4, 2)),
        Row(WIDE_GPT, "breadth-first", dp=2, tp=2, loops=2, sharding="zero-3"),
        Row(divisible("llama", heads=4), tp=4),
        Row(divisible("llama", sequence=16), cp=4),
        Row(tiny(tied=True), "zb-h1", pp=4, methods=(Clips(0.2),)),
        TIED("breadth-first", dp=2, loops=4, sharding="zero-2"),
        BOTH(WIDE_BERT, dp=2, sharding="zero-3", methods=(Clips(None),)),
        SEEN(RESNET, "1f1b", pp=2, dp=2, sharding="zero-2"),
        Row(MIXTRAL, "1f1b", pp=2, ep=2),
        FORKED("zb-h1", splits=(4, 1, 2, 1)),
        Row(GPT, "depth-first", dp=4, loops=3, micro_batches=2, sharding="zero-1", island=2),
        Row(GPT, dp=4, micro_batches=1, optimizer="adamw", steps=3, sharding="zero-3"),
        Row(GPT, dp=2, steps=6, methods=(StepsOutside(2),)),
    )
)

MOST_RANKS = 4
COVERING = covering(list(cases(MOST_RANKS)), pairs)
OF_METHODS = [
    row
    for path in sorted((Path(equality_table.__file__).parent / "methods" / "rows").glob("*.py"))
    for row in import_module(f"methods.rows.{path.stem}").ROWS
]
GROUPS = (
    PIPELINES,
    DEGREES,
    UNEVEN,
    TENSOR,
    CONTEXT,
    CONTEXT_WITH_TENSOR,
    FAMILIES,
    DECODERS,
    MIXTURES,
    CONVOLUTIONAL,
    GRAPHS,
    UNLIKE,
    TOWERS,
    CAPTURED,
    DEVICE,
    COVERING,
)
TABLE = list(dict.fromkeys(row for group in (*GROUPS, OF_METHODS) for row in group))

TRAINED = frozenset(covering(TABLE, traits, size))
# One process scales no losses, so this row is on late devices only.
SCALED = Row(tiny(), "1f1b", pp=2, precision="fp16", optimizer="adamw", methods=(Clips(0.2),), steps=3)
LATE_TABLE = [*TABLE, SCALED]
# On late devices: all rows, each with as many seeds as asked for, or every sixteenth and a few. The few of
# `make test` have every order, sharding, axis and method.
LATE_SEEDS = int(os.environ.get("WEFT_LATE_SEEDS", "0"))
TRAINED_LATE = frozenset(map(LATE_TABLE.index, [*covering(TABLE, marks, size), SCALED]))
LATE = [n for n in range(len(LATE_TABLE)) if LATE_SEEDS or n % 16 == 0 or n in TRAINED_LATE]


def beyond(cases: Sequence[Any], trained: Collection[Any]) -> list[Any]:
    """Cases as parameters; those that `make test` does not train have the mark of `make tables`."""
    return [pytest.param(one, marks=() if one in trained else pytest.mark.tables) for one in cases]


# Fields of a row whose values are words and numbers.
SEQUENCES = ("shares", "layers", "splits", "copies", "places", "devices", "recompute")
PLAIN = [one for one in fields(Row) if one.name not in ("model", "methods", *SEQUENCES)]


@pytest.fixture(scope="module")
def reference(worker_pool: WorkerPool) -> Callable[[Training], Outcome]:
    """What one process computes, once for all rows for which it stands."""

    @cache
    def compute(training: Training) -> Outcome:
        # In a worker: the sums of one matrix product depend on the number of threads, and workers have one.
        return worker_pool.run(alone, training, ranks=1)[0]

    return compute


@pytest.mark.processes
@pytest.mark.parametrize("row", beyond(TABLE, TRAINED), ids=str)
def test_a_row_trains_like_one_process(
    worker_pool: WorkerPool, reference: Callable[[Training], Outcome], row: Row
) -> None:
    plan = row.plan
    require_valid(make_program(row.model, plan))
    found = together(worker_pool.run(train, row, plan, ranks=plan.ranks))
    sizes = differences(found, reference(row.training(plan)))
    assert {name: size for name, size in sizes.items() if not size <= tolerance_of(row, name)} == {}


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(max(1, LATE_SEEDS)))
@pytest.mark.parametrize("number", beyond(LATE, TRAINED_LATE), ids=lambda n: f"{n}-{LATE_TABLE[n]}")
def test_a_row_trains_to_the_same_bits_on_late_devices(
    worker_pool: WorkerPool, number: int, seed: int
) -> None:
    """All work runs when the device gets to it, so a wait that is missing between two streams shows."""
    row = replace(LATE_TABLE[number], transport="device")
    plan = row.plan
    steps, tensors = together(worker_pool.run(train, row, plan, ranks=plan.ranks))
    late = worker_pool.run(train_late, row, plan, 1000 * number + 10 * seed, ranks=plan.ranks)
    told, found = together(late)
    assert told == steps
    assert tensors.keys() == found.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], found[name])] == []


def test_the_subset_of_the_matrix_has_every_choice() -> None:
    everything = list(cases(MOST_RANKS))
    assert len(COVERING) < len(everything) / 5
    for name in CHOICES:
        found, expected = ({dict(choices_of(row))[name] for row in rows} for rows in (COVERING, everything))
        assert found == expected


def test_the_rows_that_are_always_trained_have_every_value_and_all_that_meet() -> None:
    ways: dict[str, Callable[[Row], set[Any]]] = {
        "family": lambda row: {(row.model.family, row.model.tied_embeddings)},
        "axes": lambda row: set(combinations([axis for axis in AXES if getattr(row, axis) > 1], 2)),
        "methods": lambda row: {type(one) for one in row.methods},
        "methods and orders": lambda row: {(type(one), row.schedule) for one in row.methods},
        "methods and shardings": lambda row: {(type(one), row.sharding) for one in row.methods},
        **{field.name: lambda row, field=field: {getattr(row, field.name)} for field in PLAIN},
    }
    assert len(TRAINED) < len(TABLE) / 2.5
    for name, values in ways.items():
        found, expected = (set().union(*map(values, rows)) for rows in (TRAINED, TABLE))
        assert found == expected, name
    late = [LATE_TABLE[number] for number in TRAINED_LATE]
    assert {mark for row in late for mark in marks(row)} == {mark for row in TABLE for mark in marks(row)}


def test_a_row_with_anything_new_or_that_a_mutation_names_is_always_trained() -> None:
    new = Row(GPT, dp=2, methods=(Clips(0.123),))
    assert new not in TABLE
    assert new in covering([*TABLE, new], traits, size)
    names = {str(row) for row in TRAINED}
    stated = [test for one in mutations(rooms()) for test in one.tests if "like_one_process[" in test]
    assert len(stated) > 20
    assert [test for test in stated if test.partition("[")[2].removesuffix("]") not in names] == []


def test_rows_reduce_across_islands_in_parts_and_at_once() -> None:
    for rows, parts in ((PARTS, 2), (SAME_BITS, 1)):
        for row in (row for row in rows if row.sharding != "zero-0"):
            columns = make_program(row.model, row.plan).columns
            assert min(2, 1 + columns.part[columns.kind == REDUCE].max()) == parts, row
    kinds = [make_program(row.model, row.plan).columns.kind for row in ACROSS]
    assert all(REDUCE_ACROSS in kind for kind in kinds)
