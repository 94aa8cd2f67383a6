"""States, shards and buffers are the closed forms of ZeRO; recomputing starts from the layers' inputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import MODEL

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.predict.cost.memory import (
    ALLOCATOR_SLACK,
    SHARDINGS,
    resident_states,
    stage_input_bytes,
    stage_kept_bytes,
    state_bytes,
    with_slack,
)

GRAPH = layer_graph(MODEL)
STATES = state_bytes("bf16")
WEIGHTS, GRADIENTS, OPTIMIZER = STATES.weights, STATES.gradients, STATES.optimizer


def held(sizes: list[int], replicas: int, sharding: str) -> int:
    """Of one rank with local stages of these sizes, without the room for what arrives."""
    stages = [(np.array([0]), size, replicas) for size in sizes]
    arriving = GRADIENTS * max(sizes) if replicas > 1 else 0
    return int(resident_states(stages, 1, STATES, sharding).total[0]) - arriving  # type: ignore[arg-type]


@given(st.integers(1, 6), st.integers(1, 1000), st.integers(1, 8))
def test_equal_stages_hold_what_the_closed_forms_say(loops: int, share: int, replicas: int) -> None:
    """n_buf = 2 buffers, or one where there is one local stage; phi and phi / n are whole numbers."""
    stage = share * replicas
    phi, buffers = loops * stage, min(loops, 2)
    expected = {
        "zero-0": (WEIGHTS + GRADIENTS + OPTIMIZER) * phi,
        "zero-1": (WEIGHTS + GRADIENTS) * phi + OPTIMIZER * phi // replicas,
        "zero-2": WEIGHTS * phi
        + buffers * GRADIENTS * phi // loops
        + (GRADIENTS + OPTIMIZER) * phi // replicas,
        "zero-3": buffers * (WEIGHTS + GRADIENTS) * phi // loops
        + (WEIGHTS + GRADIENTS + OPTIMIZER) * phi // replicas,
    }
    assert {sharding: held([stage] * loops, replicas, sharding) for sharding in SHARDINGS} == expected


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=7), st.integers(1, 8))
def test_a_buffer_is_as_large_as_the_largest_stage_that_uses_it(sizes: list[int], replicas: int) -> None:
    shares = sum(-(-size // replicas) for size in sizes)
    buffers = max(sizes[0::2]) + max(sizes[1::2], default=0)
    assert (
        held(sizes, replicas, "zero-3")
        == (WEIGHTS + GRADIENTS + OPTIMIZER) * shares + (WEIGHTS + GRADIENTS) * buffers
    )


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=7), st.sampled_from(SHARDINGS))
def test_more_replicas_never_hold_more(sizes: list[int], sharding: str) -> None:
    each = [held(sizes, replicas, sharding) for replicas in range(1, 9)]
    assert each == sorted(each, reverse=True)


def test_ranks_are_counted_apart() -> None:
    stages = [(np.array([0, 1]), 10, 2), (np.array([1, 2]), 100, 2)]
    total = WEIGHTS + GRADIENTS + OPTIMIZER
    assert resident_states(stages, 4, STATES, "zero-0").total.tolist() == [
        total * 10 + GRADIENTS * 10,
        total * 110 + GRADIENTS * 100,
        total * 100 + GRADIENTS * 100,
        0,
    ]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_inputs_are_the_stream_between_layers(tensor_parallel: int) -> None:
    shape = Shape(3, 32, tensor_parallel)
    stream, tokens = 2 * 3 * 32 * MODEL.hidden // tensor_parallel, 8 * 3 * 32
    assert stage_input_bytes(GRAPH, (0, 1, 2), shape, "bf16") == tokens + 2 * stream
    assert stage_input_bytes(GRAPH, (3, 4, 5), shape, "bf16") == 3 * stream
    everything = tuple(range(len(GRAPH.layers)))
    assert stage_input_bytes(GRAPH, everything, shape, "bf16") < stage_kept_bytes(
        GRAPH, everything, shape, "bf16"
    )


def test_slack_is_a_share_of_what_is_held() -> None:
    assert with_slack(np.array([0, 1000])).tolist() == [0, round(1000 * (1 + ALLOCATOR_SLACK))]
