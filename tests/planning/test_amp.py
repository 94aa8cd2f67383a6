"""AMP's search: the formulas to nine digits, stages as good as any, the invariants of the closed form."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import amp as oracle

from weft.errors import InputError
from weft.planning.planners.amp import (
    AmpInputs,
    AmpStrategy,
    Degrees,
    amp_search,
    amp_strategy,
    degrees_of,
    slower_of_both,
)
from weft.predict.abstract import PassTimes, simulate_schedule

DEGREES = (1, 2, 4)


def inputs_of(case: oracle.Case) -> AmpInputs:
    """What the slow formulas and the planner both take."""
    return AmpInputs(
        devices=tuple(case.nodes),
        bandwidth=slower_of_both(np.array(case.inside), np.array(case.between)),
        global_batch=case.global_batch,
        forward_s={tp: tuple(row) for tp, row in case.forward_s.items()},
        sent_bytes={tp: tuple(row) for tp, row in case.sent.items()},
        gradient_bytes={tp: tuple(row) for tp, row in case.gradients.items()},
        shared_layers=tuple(case.embedding_layers),
        shared_bytes=case.embedding,
        leading=1,
        trailing=1,
    )


def ends_of(strategy: AmpStrategy) -> list[int]:
    return list(accumulate(strategy.layers_per_stage))


@st.composite
def cases(draw: st.DrawFn, most_layers: int = 9) -> oracle.Case:
    """Nodes of unequal sizes, unequal links and layers; some layers are free."""
    nodes = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3))
    layers = draw(st.integers(2, most_layers))
    seconds = st.one_of(st.just(0.0), st.floats(0.01, 3.0))
    volumes = st.floats(0.0, 5.0)
    speeds = st.floats(0.5, 20.0)

    def row(of: st.SearchStrategy[float], length: int) -> list[float]:
        return draw(st.lists(of, min_size=length, max_size=length))

    return oracle.Case(
        nodes=nodes,
        inside=row(speeds, len(nodes)),
        between=row(speeds, len(nodes)),
        global_batch=draw(st.sampled_from([1, 4, 6, 8, 12])),
        forward_s={tp: row(seconds, layers) for tp in DEGREES},
        sent={tp: row(volumes, layers) for tp in DEGREES},
        gradients={tp: row(volumes, layers) for tp in DEGREES},
        embedding={tp: draw(volumes) for tp in DEGREES},
        embedding_layers=(0, layers - 1),
    )


def uniform_case(nodes: int = 4, devices: int = 4, batch: int = 32, layers: int = 24) -> oracle.Case:
    """Equal nodes and layers."""
    return oracle.Case(
        nodes=[devices] * nodes,
        inside=[6e9] * nodes,
        between=[1e9] * nodes,
        global_batch=batch,
        forward_s={tp: [0.01 / tp] * layers for tp in DEGREES},
        sent={tp: [4e6] * layers for tp in DEGREES},
        gradients={tp: [5e7 / tp] * layers for tp in DEGREES},
        embedding={tp: 1e8 / tp for tp in DEGREES},
        embedding_layers=(0, layers - 1),
    )


@settings(max_examples=30)
@given(cases())
def test_every_strategy_is_found_and_costs_what_the_formulas_say(case: oracle.Case) -> None:
    found = {one.degrees[:4]: one for one in amp_search(inputs_of(case))}
    for tp, dp, pp, size in oracle.strategies(case):
        strategy = found.pop((tp, dp, pp, size), None)
        if strategy is None:
            working = sum(seconds > 0 for seconds in case.forward_s[tp])
            blocks = len(case.forward_s[tp]) - 2
            assert pp > working or (case.global_batch == dp * size and pp > blocks)
            continue
        ends = ends_of(strategy)
        assert strategy.seconds == pytest.approx(oracle.step_s(case, tp, dp, pp, size, ends), rel=1e-9)
        assert strategy.pipeline_s == pytest.approx(oracle.pipeline_s(case, tp, dp, pp, size, ends), rel=1e-9)
    assert not found


@settings(max_examples=20)
@given(cases(most_layers=12), st.data())
def test_no_cut_into_stages_is_better(case: oracle.Case, data: st.DataObject) -> None:
    several = [one for one in amp_search(inputs_of(case)) if one.degrees.micro_batches > 1]
    assume(several)
    strategy = data.draw(st.sampled_from(several))
    best_s, _ = oracle.best_stages(case, *strategy.degrees[:4])
    assert strategy.pipeline_s == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize(("batch", "count"), [(32, 53), (64, 65)])
def test_sixteen_devices_have_as_many_strategies_as_in_the_paper(batch: int, count: int) -> None:
    inputs = inputs_of(uniform_case(batch=batch))
    every = list(degrees_of(inputs))
    assert len(every) == len(set(every)) == count
    assert len(amp_search(inputs)) == count
    for tp, dp, pp, size, micro_batches in every:
        assert tp * dp * pp == 16
        assert dp * size * micro_batches == batch


@settings(max_examples=15)
@given(cases())
def test_estimates_come_best_first_and_equal_ones_stay_in_order(case: oracle.Case) -> None:
    inputs = inputs_of(case)
    order = list(degrees_of(inputs))
    keys = [(one.seconds, order.index(one.degrees)) for one in amp_search(inputs)]
    assert keys == sorted(keys)


@settings(max_examples=20)
@given(cases())
def test_a_pipeline_takes_its_layers_and_its_longest_stage(case: oracle.Case) -> None:
    for strategy in amp_search(inputs_of(case)):
        tp, _, pp, size, micro_batches = strategy.degrees
        layer_s = [3 * size * seconds for seconds in case.forward_s[tp]]
        ends = ends_of(strategy)
        longest = max(sum(layer_s[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True))
        assert strategy.pipeline_s >= sum(layer_s) * (1 - 1e-9)
        assert strategy.pipeline_s >= micro_batches * longest * (1 - 1e-9)
        if pp == 1:
            assert strategy.pipeline_s == pytest.approx(micro_batches * sum(layer_s), rel=1e-9)


def test_equal_layers_and_free_links_give_the_time_of_a_full_pipeline() -> None:
    case = uniform_case(layers=16)
    for strategy in amp_search(inputs_of(case._replace(sent={tp: [0.0] * 16 for tp in DEGREES}))):
        tp, _, pp, size, micro_batches = strategy.degrees
        stage_s = 3 * size * 0.01 / tp * 16 / pp
        if micro_batches == 1:
            assert strategy.pipeline_s == pytest.approx(3 * size * 0.01 / tp * 16)
        else:
            assert strategy.pipeline_s == pytest.approx((micro_batches + pp - 1) * stage_s)
            assert set(strategy.layers_per_stage) == {16 // pp}


@settings(max_examples=20)
@given(cases(), st.data())
def test_a_simulated_pipeline_is_no_longer_than_the_estimate_says(
    case: oracle.Case, data: st.DataObject
) -> None:
    """Where every backward takes twice its forward and links are free; with equal stages it is as long."""
    busy = {tp: [max(seconds, 0.01) for seconds in row] for tp, row in case.forward_s.items()}
    free = {tp: [0.0] * len(row) for tp, row in case.sent.items()}
    found = amp_search(inputs_of(case._replace(forward_s=busy, sent=free)))
    assume(found)
    strategy = data.draw(st.sampled_from(found))
    tp, _, pp, size, micro_batches = strategy.degrees
    ends = ends_of(strategy)
    # The simulator counts whole ticks.
    forward = [
        round(1000 * size * sum(busy[tp][start:end]))
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    times = [PassTimes(Fraction(one), Fraction(2 * one)) for one in forward]
    simulated = simulate_schedule("1f1b", devices=pp, micro_batches=micro_batches, stage_times=times).makespan
    estimate = 3 * (sum(forward) + (micro_batches - 1) * max(forward))
    assert 3 * max(micro_batches * max(forward), sum(forward)) <= simulated <= estimate
    if len(set(forward)) == 1:
        assert simulated == estimate


def test_one_replica_reduces_nothing_and_one_device_takes_its_profile() -> None:
    for strategy in amp_search(inputs_of(uniform_case())):
        assert (strategy.reduction_s == 0.0) == (strategy.degrees.data_parallel == 1)
    (alone,) = amp_search(inputs_of(uniform_case(nodes=1, devices=1, batch=1, layers=5)))
    assert alone.seconds == pytest.approx(3 * 5 * 0.01)


@settings(max_examples=15)
@given(cases(), st.sampled_from([0.25, 2.0, 8.0]))
def test_slower_layers_and_links_scale_every_pipeline(case: oracle.Case, factor: float) -> None:
    slower = case._replace(
        forward_s={tp: [factor * one for one in row] for tp, row in case.forward_s.items()},
        sent={tp: [factor * one for one in row] for tp, row in case.sent.items()},
    )
    after = {one.degrees: one for one in amp_search(inputs_of(slower))}
    for before in amp_search(inputs_of(case)):
        assert after[before.degrees].layers_per_stage == before.layers_per_stage
        assert after[before.degrees].pipeline_s == pytest.approx(factor * before.pipeline_s, rel=1e-9)


@settings(max_examples=15)
@given(cases(), st.data())
def test_a_faster_link_or_layer_never_makes_a_pipeline_slower(case: oracle.Case, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, len(case.nodes) - 1))
    layer = data.draw(st.integers(0, len(case.forward_s[1]) - 1))
    better = case._replace(
        inside=[speed * (2 if index == node else 1) for index, speed in enumerate(case.inside)],
        between=[speed * (3 if index == node else 1) for index, speed in enumerate(case.between)],
        forward_s={
            tp: [one / (2 if index == layer else 1) for index, one in enumerate(row)]
            for tp, row in case.forward_s.items()
        },
    )
    after = {one.degrees: one for one in amp_search(inputs_of(better))}
    for before in amp_search(inputs_of(case)):
        # With one micro-batch stages are not searched, and faster links alone make them no worse either.
        assert after[before.degrees].pipeline_s <= before.pipeline_s * (1 + 1e-9)


@settings(max_examples=10)
@given(cases(), st.data())
def test_equal_nodes_can_change_places(case: oracle.Case, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(case.nodes))))
    alike = case._replace(
        nodes=[case.nodes[0]] * len(case.nodes),
        inside=[case.inside[0]] * len(case.nodes),
        between=[case.between[0]] * len(case.nodes),
    )
    inputs = inputs_of(alike)
    firsts = np.array(order).repeat(alike.nodes)
    for degrees in degrees_of(inputs):
        assert amp_strategy(inputs, degrees, firsts) == amp_strategy(inputs, degrees)


@settings(max_examples=10)
@given(cases())
def test_given_stages_are_estimated_like_found_ones(case: oracle.Case) -> None:
    inputs = inputs_of(case)
    for found in amp_search(inputs):
        assert amp_strategy(inputs, found.degrees, None, found.layers_per_stage) == found


def test_a_node_far_away_is_better_at_the_end_of_the_pipeline_than_in_a_ring() -> None:
    inputs = inputs_of(uniform_case(nodes=2, devices=2, layers=8))
    slow = replace(inputs, bandwidth=slower_of_both(np.array([6e9, 6e9]), np.array([1e9, 1e7])))
    across = np.array([0, 1, 0, 1])
    degrees = Degrees(1, 2, 2, 1, 16)
    inside, between = amp_strategy(slow, degrees), amp_strategy(slow, degrees, across)
    assert inside is not None
    assert between is not None
    assert inside.reduction_s < between.reduction_s
    assert inside.pipeline_s > between.pipeline_s


def test_layers_are_shared_out_by_count_where_there_is_one_micro_batch() -> None:
    inputs = inputs_of(uniform_case(nodes=1, devices=4, batch=4, layers=9))
    strategy = amp_strategy(inputs, Degrees(1, 1, 4, 4, 1))
    assert strategy is not None
    assert strategy.layers_per_stage == (3, 2, 2, 2)
    assert amp_strategy(inputs_of(uniform_case(nodes=1, layers=5)), Degrees(1, 1, 4, 32, 1)) is not None
    assert amp_strategy(inputs_of(uniform_case(nodes=1, layers=4)), Degrees(1, 1, 4, 32, 1)) is None


def test_a_batch_that_replicas_cannot_share_drops_these_strategies() -> None:
    assert {one.data_parallel for one in degrees_of(inputs_of(uniform_case(batch=6)))} == {1, 2}


def test_free_layers_leave_no_stage_without_work() -> None:
    case = uniform_case(nodes=1, layers=4)
    idle = case._replace(forward_s={tp: [0.0, 0.1, 0.1, 0.0] for tp in DEGREES})
    assert {one.degrees.pipeline_parallel for one in amp_search(inputs_of(idle))} == {1, 2}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sent_bytes": {1: (1.0,) * 24}}, "AMP: sent_bytes: tensor degrees 1 where forward_s has 1, 2, 4"),
        (
            {"gradient_bytes": dict.fromkeys(DEGREES, (1.0,) * 23)},
            "AMP: gradient_bytes: 23 layers at tensor degree 1; there are 24",
        ),
        ({"bandwidth": np.ones((2, 4))}, "AMP: bandwidth: 2 x 4 for 4 nodes (nearest valid: 4 x 4)"),
    ],
)
def test_tables_that_do_not_belong_together_are_refused(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(inputs_of(uniform_case()), **changes)
    assert str(caught.value).splitlines()[0] == expected
