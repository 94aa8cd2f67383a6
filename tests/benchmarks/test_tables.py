"""Tables of a page, made from figures: exact text, and what the page has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from figures import Figure, Machine, Record, Row, Value
from tables import PAGE, TABLES, Crossed, marked, table, with_tables

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def row(benchmark: str, name: str, value: Value, load: float = 0.5, commit: str = "aaaa") -> Row:
    where = Machine(
        cpu="a processor",
        cores=2,
        system="Linux 6",
        versions={"weft": "0.1.0", "torch": "2.13"},
        commit=commit,
        date="2026-11-23T07:00:00+00:00",
        load_begin=load,
        load_end=load,
        steal=0.0,
    )
    return Row(Figure.of(benchmark, name, value), where)


ROWS = [
    row("start_up", "import weft, without starting Python", Value(0.008, "s", 0.3, low=0.007, high=0.01)),
    row("start_up", "8 ranks, pp 4 x dp 2 x tp 1: reads the plan", Value(0.0006, "s")),
    row("start_up", "8 ranks, pp 4 x dp 2 x tp 1: peak", Value(55.5e6, "bytes")),
    row("start_up", "from 8 to 4096 ranks, once more", Value(2.5, "ratio", 2.0)),
    row("programs", "build", Value(0.079, "s"), load=9.0),
]
WHERE = "a processor, 2 cores, Linux 6. torch 2.13. Commit aaaa, 2026-11-23. Load average"


def test_figures_are_listed_with_their_targets() -> None:
    assert table("start_up", ROWS) == [
        "| what | figure | target |",
        "|---|---|---|",
        "| import weft, without starting Python | 8.00 ms (7.00 ms to 10.0 ms) | 300 ms: met |",
        "",
        f"{WHERE} 0.5 to 0.5, steal up to 0%.",
    ]
    assert table("start_up, growth", ROWS)[2] == "| from 8 to 4096 ranks, once more | 2.5 | 2: missed |"


def test_cells_of_several_figures_are_rows() -> None:
    heading, rule, only, *_ = table("start_up, ranks", ROWS)
    assert heading.startswith("| the last of | reads the plan | compiles its part |")
    assert rule == "|---|---|---|---|---|---|---|---|"
    assert only == "| 8 ranks, pp 4 x dp 2 x tp 1 | 600 us | - | - | 55.5 MB | - | - | - |"
    found = table("taps", [row("taps", "a: share", Value(0.038, "share", 0.03, low=0.019, high=0.052))])
    assert found[2] == "| a | - | - | 3.8 % (1.9 % to 5.2 %); target 3.0 %: missed |"


def test_figures_of_a_busy_machine_say_so() -> None:
    assert table("programs", ROWS)[2:] == [
        "| build | 79.0 ms *busy* | - |",
        "",
        f"{WHERE} 9.0 to 9.0, steal up to 0%. *Busy*: others had the machine, too.",
    ]


def test_a_table_is_of_the_commit_that_measured_last() -> None:
    rows = [*ROWS, row("programs", "verify", Value(0.5, "s"), commit="bbbb")]
    assert [line for line in table("programs", rows) if "build" in line or "verify" in line] == [
        "| verify | 500 ms | - |"
    ]


PAGE_TEXT = """\
# Page

<!-- figures: programs -->
old
<!-- end -->

<!-- figures: recorder -->
as it was
<!-- end -->
"""


def test_marked_tables_are_made_anew_where_there_are_figures(tmp_path: Path) -> None:
    page, record = tmp_path / "page.md", Record(tmp_path / "figures.jsonl")
    page.write_text(PAGE_TEXT)
    record.append(ROWS)
    command = [sys.executable, BENCHMARKS / "tables.py", "--record", record.path, "--page", page]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told == "programs: made\nrecorder: stays, the record has no figures of it\n"
    assert marked(page.read_text()) == {"programs": table("programs", ROWS), "recorder": ["as it was"]}
    once = page.read_text()
    assert with_tables(once, lambda name: table(name, ROWS)) == once


def test_a_marker_that_nothing_makes_is_refused() -> None:
    with pytest.raises(KeyError):
        with_tables(PAGE_TEXT.replace("recorder", "nothing"), lambda name: table(name, ROWS))


def test_the_page_has_the_tables_that_are_made() -> None:
    found = marked(PAGE.read_text())
    assert set(found) == set(TABLES)
    for name, lines in found.items():
        asked = TABLES[name]
        columns = (
            [asked.first, *asked.columns] if isinstance(asked, Crossed) else ["what", "figure", "target"]
        )
        assert lines[0] == f"| {' | '.join(columns)} |", name
        assert lines[1] == "|" + "---|" * len(columns), name
