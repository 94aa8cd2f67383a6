from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.predict.abstract import PassTimes, simulate_schedule

ratios = st.sampled_from(
    [(Fraction(1), Fraction(1)), (Fraction(1), Fraction(2)), (Fraction(3, 7), Fraction(5, 4))]
)
hops = st.sampled_from([Fraction(0), Fraction(1, 10), Fraction(1, 3), Fraction(2)])


@given(st.integers(1, 6), st.integers(1, 12), ratios, st.sampled_from(["gpipe", "1f1b"]))
def test_unlooped_schedules_take_the_closed_form(
    devices: int, micro_batches: int, ratio: tuple[Fraction, Fraction], name: str
) -> None:
    forward, backward = ratio
    figures = simulate_schedule(
        name, devices=devices, micro_batches=micro_batches, forward=forward, backward=backward
    )
    assert figures.makespan == (micro_batches + devices - 1) * (forward + backward)
    assert figures.bubble_overhead == pytest.approx((devices - 1) / micro_batches)


@given(st.integers(2, 6), st.integers(1, 12), st.integers(1, 4), ratios, hops)
def test_breadth_first_takes_the_closed_form(
    devices: int, micro_batches: int, loops: int, ratio: tuple[Fraction, Fraction], hop: Fraction
) -> None:
    """Exactly, with its waits for transfers; derived and checked for Lamy-Poirier, arXiv 2211.05953."""
    (f, b), c, p, m, v = ratio, hop, devices, micro_batches, loops
    waits = sum(max(Fraction(0), p * c - (m - p) * part / v) for part in (f, b))
    expected = m * (f + b) + (p - 1) * (f + b) / v + 2 * (p - 1) * c + (v - 1) * waits
    figures = simulate_schedule(
        "breadth-first", devices=p, loops=v, micro_batches=m, forward=f, backward=b, hop=c
    )
    assert figures.makespan == expected
    assert figures.peak_in_flight == (m * v,) * p


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), ratios)
def test_depth_first_takes_the_closed_form_where_devices_divide_micro_batches(
    devices: int, rounds: int, loops: int, ratio: tuple[Fraction, Fraction]
) -> None:
    (f, b), p, m, v = ratio, devices, devices * rounds, loops
    figures = simulate_schedule("depth-first", devices=p, loops=v, micro_batches=m, forward=f, backward=b)
    assert figures.makespan == m * (f + b) + (p - 1) * (f + b) / v
    assert figures.peak_in_flight == tuple(min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1) for r in range(p))


@given(st.integers(2, 5), st.integers(0, 3), st.integers(1, 4), st.integers(1, 3), ratios)
def test_hybrid_pays_the_bubble_once_a_round(
    devices: int, more: int, depth: int, loops: int, ratio: tuple[Fraction, Fraction]
) -> None:
    (f, b), p, v, breadth = ratio, devices, loops, devices + more
    m = breadth * depth
    figures = simulate_schedule(
        "hybrid", devices=p, loops=v, micro_batches=m, forward=f, backward=b, options={"depth": depth}
    )
    assert figures.makespan == (f + b) * (m + Fraction(depth * (p - 1), v))
    assert figures.peak_in_flight == (breadth * v,) * p


@given(st.integers(1, 4), ratios)
def test_one_round_of_chimera_takes_the_closed_form(half: int, ratio: tuple[Fraction, Fraction]) -> None:
    """As many micro-batches as devices; Osawa et al., arXiv 2211.14133, performance model."""
    (f, b), p = ratio, 2 * half
    figures = simulate_schedule("chimera", devices=p, micro_batches=p, forward=f, backward=b)
    assert figures.makespan == p * f + (2 * p - 2) * b
    assert figures.peak_in_flight == tuple(half + 1 + min(r, p - 1 - r) for r in range(p))


@pytest.mark.parametrize(
    ("devices", "micro_batches", "makespan"), [(4, 4, 16), (4, 8, 30), (8, 16, 66), (8, 24, 96)]
)
def test_more_rounds_of_chimera_wait_for_each_other(devices: int, micro_batches: int, makespan: int) -> None:
    """What the order of the authors' code takes, which is more than the model says of several rounds."""
    figures = simulate_schedule("chimera", devices=devices, micro_batches=micro_batches)
    assert figures.makespan == makespan


@given(st.integers(1, 4), st.integers(0, 3), st.sampled_from(["gpipe", "1f1b", "breadth-first", "zb-h1"]))
def test_frozen_stages_save_their_backwards(devices: int, frozen: int, name: str) -> None:
    frozen = min(frozen, devices - 1)
    one = simulate_schedule(name, devices=devices, micro_batches=devices, frozen_stages=frozen)
    two = simulate_schedule(name, devices=devices, micro_batches=devices)
    saved = {"backward": 0.0, "backward_input": 0.0, "backward_weight": 0.0}
    for kind in set(saved) & set(two.breakdown):
        saved[kind] = two.breakdown[kind] - one.breakdown[kind]
    assert sum(saved.values()) == pytest.approx(2 * devices * frozen)
    assert one.breakdown["forward"] == two.breakdown["forward"]
    assert one.peak_in_flight[:frozen] == (0,) * frozen
    assert one.makespan <= two.makespan


@given(st.integers(2, 5), st.integers(0, 8), st.integers(1, 3), ratios, hops, st.data())
def test_breadth_first_is_never_slower_than_depth_first_on_uniform_stages(
    devices: int,
    more: int,
    loops: int,
    ratio: tuple[Fraction, Fraction],
    hop: Fraction,
    data: st.DataObject,
) -> None:
    m = devices + more
    legal = [size for size in range(devices, m + 1) if m % size == 0 or m % size >= devices]
    sizes = {"group_size": data.draw(st.sampled_from(legal))}
    breadth, depth = (
        simulate_schedule(
            name,
            devices=devices,
            loops=loops,
            micro_batches=m,
            forward=ratio[0],
            backward=ratio[1],
            hop=hop,
            options=options,
        ).makespan
        for name, options in (("breadth-first", {}), ("depth-first", sizes))
    )
    assert breadth <= depth


GOLDEN = {
    ("depth-first", 2): (28.5, 52.5, 58.5),
    ("breadth-first", 2): (28.5, 52.5, 58.5),
    ("zb-h1", 1): (27, 51, 55),
    ("zb-v", 2): (25.5, 49.5, 51.5),
}


@pytest.mark.parametrize(("name", "loops"), GOLDEN)
def test_golden_makespans(name: str, loops: int) -> None:
    """Forward, input part and weight part of a device's micro-batch take 1 each."""
    found = [
        simulate_schedule(name, devices=devices, loops=loops, micro_batches=micro_batches).makespan
        for devices, micro_batches in ((4, 8), (4, 16), (8, 16))
    ]
    assert tuple(found) == GOLDEN[name, loops]


@given(st.integers(1, 6), st.integers(0, 12))
def test_zero_bubble_schedules_only_keep_the_skew_when_the_parts_are_equal(devices: int, more: int) -> None:
    for name, loops, micro_batches, skew in (
        ("zb-h1", 1, devices + more, Fraction(devices - 1)),
        ("zb-v", 2, 2 * devices - 1 + more, Fraction(devices - 1, 2)),
    ):
        figures = simulate_schedule(name, devices=devices, loops=loops, micro_batches=micro_batches)
        assert figures.makespan == 3 * micro_batches + skew


@pytest.mark.parametrize(
    ("name", "loops", "makespan"),
    [("breadth-first", 2, "28.5"), ("depth-first", 2, "28.5"), ("zb-h1", 1, "28.2"), ("zb-v", 2, "25.8")],
)
def test_golden_makespans_of_an_unequal_split(name: str, loops: int, makespan: str) -> None:
    figures = simulate_schedule(name, devices=4, loops=loops, micro_batches=8, weight_share=0.4)
    assert figures.makespan == Fraction(makespan)


def test_a_golden_overhead_of_depth_first_with_a_ragged_group() -> None:
    """Sheet: 25 % for breadth-first; depth-first in one group keeps to it, in two it has no legal size."""
    breadth = simulate_schedule("breadth-first", devices=4, loops=2, micro_batches=6)
    assert breadth.bubble_overhead == pytest.approx(0.25)
    with pytest.raises(InputError, match="nearest group_size: 6"):
        simulate_schedule("depth-first", devices=4, loops=2, micro_batches=6)


stage_lists = st.lists(
    st.builds(PassTimes, *[st.fractions(Fraction(1, 4), 4, max_denominator=8)] * 2), min_size=3, max_size=9
)


@given(stage_lists, st.integers(3, 6), st.sampled_from(["breadth-first", "depth-first", "hybrid"]))
def test_unequal_stages_take_at_least_the_busiest_device_and_the_critical_path(
    stages: list[PassTimes], micro_batches: int, name: str
) -> None:
    options = {"group_size": micro_batches} if name == "depth-first" else {}
    figures = simulate_schedule(
        name, devices=3, micro_batches=micro_batches, stage_times=stages, options=options
    )
    totals = [stage.forward + stage.backward for stage in stages]
    assert figures.ideal == micro_batches * max(sum(totals[device::3]) for device in range(3))
    assert figures.makespan >= max(figures.ideal, sum(totals))
    assert figures.loops == -(-len(stages) // 3)


def test_equal_stage_times_are_uniform_stages() -> None:
    one = PassTimes(Fraction(1, 2), Fraction(1))
    listed = simulate_schedule("zb-v", devices=3, micro_batches=5, stage_times=[one] * 6)
    assert listed.makespan == simulate_schedule("zb-v", devices=3, micro_batches=5, loops=2).makespan


def test_a_dump_lists_what_the_count_counts() -> None:
    figures = simulate_schedule("zb-h1", devices=2, micro_batches=2, weight_share="1/4")
    instructions = figures.record(dump=True)["instructions"]
    assert len(instructions) == figures.record()["instructions"]
    assert len({row["id"] for row in instructions}) == len(instructions)
    (weight,) = [
        row
        for row in instructions
        if row["kind"] == "backward_weight" and row["rank"] == 1 and row["micro_batch"] == 0
    ]
    assert weight["stage"] == 1
    assert weight["end_s"] - weight["start_s"] == pytest.approx(0.5)
    assert "peer" not in weight
    assert {row["peer"] for row in instructions if row["kind"] == "send_activation"} == {1}
    assert max(row["end_s"] for row in instructions) == pytest.approx(float(figures.makespan))


def test_figures_agree_with_each_other() -> None:
    figures = simulate_schedule("1f1b", devices=4, micro_batches=8, forward=0.1, backward=0.2, hop=0.05)
    record = figures.record()
    assert record["peak_in_flight"] == [4, 3, 2, 1]
    busy = record["breakdown"]["forward"] + record["breakdown"]["backward"]
    assert busy == pytest.approx(4 * 8 * 0.3)
    assert record["bubble_fraction"] == pytest.approx(1 - busy / (4 * record["makespan_s"]))
    assert record["bubble_overhead"] == pytest.approx(record["makespan_s"] / 2.4 - 1)
    assert record["instructions"] == len(figures.program) == len(figures.timeline)
    assert figures.timeline.end_ns.max() == pytest.approx(record["makespan_s"] * 1e9)


def test_decimals_are_taken_as_typed() -> None:
    figures = simulate_schedule("gpipe", devices=3, micro_batches=7, forward=0.1, backward="1/3")
    assert figures.makespan == 9 * (Fraction(1, 10) + Fraction(1, 3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"devices": 0, "micro_batches": -1}, ["ranks", "micro-batches"]),
        ({"forward": float("nan"), "backward": -1}, ["forward", "backward"]),
        ({"forward": 0}, ["more than 0"]),
        ({"hop": "fast"}, ["hop"]),
        ({"loops": 2}, ["1f1b"]),
        ({"weight_share": 1}, ["less than 1"]),
        ({"weight_share": 0}, ["weight share", "more than 0"]),
        ({"stage_times": (), "loops": 1, "forward": 1}, ["no stage", "loops", "forward"]),
        ({"options": {"depth": 2}}, ["depth", "no such option"]),
        ({"forward": 1e-300, "backward": 1e300}, ["common unit"]),
    ],
)
def test_nonsense_is_refused_in_words(change: dict[str, object], words: list[str]) -> None:
    arguments = {"devices": 2, "micro_batches": 4, **change}
    with pytest.raises(InputError) as refused:
        simulate_schedule("1f1b", **arguments)  # type: ignore[arg-type]
    assert all(word in str(refused.value) for word in words)


def test_an_unknown_schedule_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="breadth-first"):
        simulate_schedule("breadth_first", devices=2, micro_batches=2)


@pytest.mark.parametrize(("name", "counts"), [("breadth-first", (6, 4)), ("depth-first", (20, 8))])
def test_the_record_counts_gathers_and_reductions_of_sharded_states(
    name: str, counts: tuple[int, int]
) -> None:
    record = simulate_schedule(name, devices=4, loops=4, micro_batches=8).record()
    assert (record["gathers"], record["reduces"]) == counts
