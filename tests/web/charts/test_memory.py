"""The picture of peak memory."""

from __future__ import annotations

import re

from weft.web.charts.cluster import memory_svg


def test_bars_of_memory_are_as_long_as_what_is_held_and_never_longer_than_the_device() -> None:
    svg = memory_svg([25, 25, 200], [100, 100, 100], title="memory")
    assert re.findall(r'width="([\d.]+)" height="18" fill', svg) == ["140.0", "560.0"]
    assert "ranks 0-1" in svg
    assert "(200%)" in svg
