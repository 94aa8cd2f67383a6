"""The micro-batches that devices keep at once, as a walk through their orders counts them."""

from collections.abc import Sequence

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from weft.planning.planners.kept_micro_batches import KeptMicroBatches
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from weft.program.schedules import SCHEDULES, get_schedule
from weft.program.schedules.base import ComputeOrder, Pipeline

BYTES = st.lists(st.integers(0, 10**6), min_size=8, max_size=8)


def walked(order: ComputeOrder, left: Sequence[int], whole: Sequence[int], taken: Sequence[int]) -> int:
    """Return the most bytes that a device holds, from one computation to the next."""
    held = most = 0
    for kind, stage in zip(order.kind.tolist(), order.stage.tolist(), strict=True):
        if kind in (BACKWARD, BACKWARD_INPUT):
            most = max(most, held + taken[stage])
        held += {
            FORWARD: left[stage],
            BACKWARD: -left[stage],
            BACKWARD_INPUT: whole[stage] - left[stage],
            BACKWARD_WEIGHT: -whole[stage],
        }[kind]
        most = max(most, held)
    return most


@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 2), st.integers(1, 12), *[BYTES] * 3
)
def test_the_most_is_that_of_a_walk_through_each_order(name, devices, loops, count, left, whole, taken):
    schedule, pipeline = get_schedule(name), Pipeline(devices, loops * devices, count)
    assume(schedule.refuse(pipeline, {}) is None)
    orders = [schedule.order(pipeline, device, {}) for device in range(devices)]
    most = KeptMicroBatches.of(orders).most(*map(np.array, (left, whole, taken)))
    assert most.tolist() == [walked(order, left, whole, taken) for order in orders]


def test_a_device_with_fewer_stages_than_another_counts_its_own():
    def both(*stages: int) -> ComputeOrder:
        there_and_back = [*stages, *reversed(stages)]
        kinds = [FORWARD] * len(stages) + [BACKWARD] * len(stages)
        return ComputeOrder(*map(np.array, (kinds, there_and_back, [0] * len(kinds))))

    one = np.ones(3, dtype=np.int64)
    assert KeptMicroBatches.of([both(0, 2), both(1)]).most(one, one, 0 * one).tolist() == [2, 1]
