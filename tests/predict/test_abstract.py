from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.predict.abstract import simulate_schedule

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


@pytest.mark.parametrize(
    ("devices", "micro_batches", "makespan"), [(4, 8, 28.5), (4, 16, 52.5), (8, 16, 58.5)]
)
def test_golden_makespans_of_two_loops(devices: int, micro_batches: int, makespan: float) -> None:
    figures = simulate_schedule("breadth-first", devices=devices, loops=2, micro_batches=micro_batches)
    assert figures.record()["makespan_s"] == makespan


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
