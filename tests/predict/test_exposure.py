"""How much of the gradients' reduction a step shows, with the exposure of every order computed by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.programs import costs_of
from program.layouts import training_program

from weft.methods.sharding.kinds import GATHER, REDUCE
from weft.predict.simulator import simulate
from weft.program.kinds import BACKWARD, FORWARD

DEVICES, LAYERS = 4, 16
ORDERS = (("gpipe", 1), ("1f1b", 1), ("depth-first", 4), ("breadth-first", 4))
UNIT = 64


def over_ideal(
    name: str, loops: int, micro_batches: int, reduction: Fraction, sharding: str = "zero-0", gather: int = 0
) -> float:
    """Step time over M (f + b), f = 1 and b = 2, where reducing a device's gradients takes
    `reduction` (f + b), layer by layer and on one queue."""
    program = training_program(name, DEVICES, DEVICES * loops, (micro_batches,) * 2, sharding=sharding)
    kind = program.columns.kind
    occupancy = np.zeros(len(program), dtype=np.int64)
    lead = np.zeros(len(program), dtype=np.int64)
    layers = LAYERS // loops
    for code, ticks in ((FORWARD, UNIT), (BACKWARD, 2 * UNIT), (REDUCE, int(3 * UNIT * reduction))):
        occupancy[kind == code] = ticks // loops
    occupancy[kind == GATHER] = gather // loops
    backward = 2 * UNIT // loops
    lead[kind == REDUCE] = min(backward, int(3 * UNIT * reduction) // loops) * (layers - 1) // layers
    costs = replace(costs_of(program, occupancy), synchronous=np.zeros(program.ranks, np.bool_), lead=lead)
    return simulate(program, costs, max_cycles=1).first_step_ticks / (3 * UNIT * micro_batches)


@pytest.mark.parametrize(
    ("micro_batches", "reduction", "expected"),
    [
        (8, 4, (1.7969, 1.7969, 1.3281, 1.2031)),
        (16, 4, (1.3984, 1.3984, 1.1641, 1.1016)),
        (8, 2, (1.5469, 1.5469, 1.1406, 1.1406)),
    ],
)
def test_golden_exposures(micro_batches: int, reduction: int, expected: tuple[float, ...]) -> None:
    found = [over_ideal(name, loops, micro_batches, Fraction(reduction)) for name, loops in ORDERS]
    assert found == pytest.approx(expected, abs=5e-5)


def test_depth_first_and_breadth_first_show_the_same_with_a_micro_batch_for_every_device() -> None:
    found = [over_ideal(name, loops, DEVICES, Fraction(4)) for name, loops in ORDERS[2:]]
    assert found == pytest.approx([1.65625, 1.65625])


@given(st.integers(1, 3), st.fractions(0, 6, max_denominator=8))
def test_breadth_first_shows_the_least(rounds: int, reduction: Fraction) -> None:
    gpipe, one, depth, breadth = (
        over_ideal(name, loops, DEVICES * rounds, reduction) for name, loops in ORDERS
    )
    assert breadth <= depth <= one == gpipe


@given(st.integers(1, 3), st.fractions(0, 6, max_denominator=8), st.integers(0, 256))
def test_weights_gathered_once_a_pass_hide_better_than_once_a_group(
    rounds: int, reduction: Fraction, gather: int
) -> None:
    depth, breadth = (
        over_ideal(name, loops, DEVICES * rounds, reduction, "zero-3", gather) for name, loops in ORDERS[2:]
    )
    assert breadth <= depth


@given(st.integers(1, 3), st.integers(0, 256))
def test_only_the_first_gather_and_the_last_reduction_are_shown_while_each_is_shorter_than_a_stage(
    rounds: int, gather: int
) -> None:
    """The bound of MegaScale, section 3.2, for the breadth-first order with shared-out optimizer states."""
    loops, micro_batches = 4, DEVICES * rounds
    reduction = Fraction(1, 2)
    shown = over_ideal("breadth-first", loops, micro_batches, reduction, "zero-1", gather)
    alone = over_ideal("breadth-first", loops, micro_batches, Fraction(0))
    # Later gathers run beside the forwards of the stage before, M f / v long.
    slower = max(0, gather // loops - micro_batches * UNIT // loops) * (loops - 1)
    exposed = gather // loops + slower + int(3 * UNIT * reduction) // loops
    assert (shown - alone) * 3 * UNIT * micro_batches <= exposed + 1e-9
