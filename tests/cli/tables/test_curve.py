"""Tables and figures of the curve."""

from __future__ import annotations

import pytest
from cli.tables.printed import text_of
from rich.table import Table
from web.plans import small_curve

from weft.cli.curve import curve_record, layouts_table, trade_off_table, utilisation_table

DEVICES = (4, 64, 4096)


def lines_of(table: Table) -> list[str]:
    return [line.rstrip() for line in text_of(table).splitlines()]


def test_tables_fit_80_columns_and_mark_what_does_not_fit() -> None:
    small = small_curve()
    utilisation = lines_of(utilisation_table(small))
    assert utilisation[0].split() == ["method", "1/4", "2"]
    assert utilisation[2].split()[:2] == ["depth-first", "-"]
    assert len(utilisation) == 1 + len(small.methods)
    layouts = " ".join(lines_of(layouts_table(small.points)))
    assert "nearest: 2 micro-batches" in " ".join(layouts.split())
    costs = lines_of(trade_off_table(small, DEVICES, 512))
    assert costs[0].split() == ["devices", "4", "64", "4096"]
    assert costs[-1].startswith("least time")
    assert all(line.count(" at ") == 3 for line in costs[1:-1])


def test_the_record_has_a_row_for_every_point_and_cluster_size() -> None:
    small = small_curve()
    record = curve_record(small, DEVICES, 512)
    assert len(record["points"]) == len(small.points)
    first, missing = record["points"][0], record["points"][2]
    assert first["method"] == "breadth-first"
    assert 0 < first["utilisation"] < 1
    assert first["plan_id"]
    assert missing["method"] == "depth-first"
    assert missing["utilisation"] is None
    rows = record["trade_off"]
    assert len(rows) == len(small.methods) * len(DEVICES)
    assert all(row["time"] == pytest.approx(row["cost"] * 4 / row["devices"]) for row in rows)
