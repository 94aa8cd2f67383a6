"""Law: records of nodes with clocks of their own, shifted and drifting, lie on rank 0's clock again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import RunError
from weft.run.record.clocks import ClockComparison, NodeClocks, forget_clocks, read_clocks, write_clocks
from weft.run.record.slots import RECORD_TYPE, slots_path

# Nanoseconds since a start some months ago: a float does not hold all their digits.
TIMES = st.integers(0, 10**16)


def records(times_ns: list[int]) -> np.ndarray:
    found = np.zeros(len(times_ns), RECORD_TYPE)
    for place, name in enumerate(("posted_ns", "start_ns", "end_ns")):
        found[name] = [one + place for one in times_ns]
    return found


@given(
    begin_ns=TIMES,
    zero_ns=st.integers(-(10**16), 10**16),
    drift=st.integers(-50, 50),
    seconds=st.lists(st.integers(0, 100), min_size=1, max_size=5),
)
def test_times_lie_on_the_first_clock_again(
    begin_ns: int, zero_ns: int, drift: int, seconds: list[int]
) -> None:
    """The node's clock gains `drift` microseconds on rank 0's in each second of its own."""

    def offset(after_s: int) -> int:
        return zero_ns - 1000 * drift * after_s

    clocks = NodeClocks(
        {2: [ClockComparison(begin_ns + 10**9 * one, offset(one), 10) for one in (0, 100)]},
    )
    own = [begin_ns + 10**9 * one for one in seconds]
    mapped = clocks.on_first(3, records(own))
    for place, name in enumerate(("posted_ns", "start_ns", "end_ns")):
        expected = [time + place + offset(one) for time, one in zip(own, seconds, strict=True)]
        assert np.abs(mapped[name] - np.array(expected)).max() <= 1
    assert clocks.error_ns == 10


def test_the_first_node_and_a_run_on_one_have_the_first_clock_already() -> None:
    own = records([5, 7])
    clocks = NodeClocks({2: [ClockComparison(0, 10**6, 10)]})
    assert (clocks.on_first(1, own) == own).all()
    assert (clocks.on_first(2, own)["start_ns"] == own["start_ns"] + 10**6).all()
    assert (NodeClocks({}).on_first(0, own) == own).all()


def test_a_run_on_one_node_forgets_the_clocks_of_a_former_start(tmp_path: Path) -> None:
    clocks = NodeClocks(
        {2: [ClockComparison(1, 2, 3)], 4: [ClockComparison(4, 5, 6), ClockComparison(7, 8, 9)]}
    )
    write_clocks(tmp_path, clocks)
    assert read_clocks(tmp_path) == clocks
    forget_clocks(tmp_path)
    assert read_clocks(tmp_path) == NodeClocks({})


@pytest.mark.parametrize("text", ["", "[]", '{"2": [1]}', '{"x": []}'])
def test_a_broken_file_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = slots_path(tmp_path, 0).with_name("clocks.json")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RunError, match=r"clocks\.json: broken; remove it"):
        read_clocks(tmp_path)
