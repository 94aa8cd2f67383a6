"""The record of figures, what a rerun leaves out, and what benchmarks report."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import run_all
from figures import Figure, Machine, Record, Row, Value, commit_of, current
from harness import Report, parser, timed, words_for_workers

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# No benchmarks by themselves: what they share, what reads their figures, and a command for questions.
SHARED = {"figures", "harness", "tables", "compare", "beside", "sleeping", "namespaces", "lab_plans_worker"}
SHARED |= {
    "server_sums_worker",
    "link",
    "linked",
    "peers",
    "torch_orders",
    "tracked",
    "decoder_files",
    "watched_group",
    "fused_loss",
    "bubble_usage",
    "pipefisher_model",
}
SHARED |= {"published_blocks", "operator_graphs"}
SCRIPTS = [
    path
    for path in sorted([*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("gpu/*.py")])
    if path.stem not in SHARED
]


def machine(**more: object) -> Machine:
    quiet = Machine(
        cpu="a processor",
        cores=2,
        system="Linux 6",
        versions={"weft": "0.1.0"},
        commit="aaaa",
        date="2026-11-23T07:00:00+00:00",
        load_begin=0.5,
        load_end=1.0,
        steal=0.0,
    )
    return replace(quiet, **more)


def asked(*words: object) -> argparse.Namespace:
    return parser("what is measured").parse_args([str(word) for word in words])


def test_a_row_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [
        Row(Figure.of("start_up", "import", Value(0.1, "s", 0.3, low=0.05, high=0.2)), machine()),
        Row(Figure.of("start_up", "plan", Value(2.0, "s")), machine(steal=0.5)),
    ]
    record = Record(tmp_path / "folder" / "figures.jsonl")
    assert record.rows() == []
    record.append(rows[:1])
    record.append(rows[1:])
    assert record.rows() == rows
    assert [row.figure.met for row in rows] == [True, None]


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    record = Record(tmp_path / "figures.jsonl")
    rows = [Row(Figure("b", name, 1.0, "count"), machine()) for name in ("one", "two", "three")]
    record.append(rows[:2])
    record.path.write_bytes(record.path.read_bytes()[:-5])
    assert record.rows() == rows[:1]
    record.append(rows[2:])
    assert record.rows() == [rows[0], rows[2]]


def test_a_rerun_leaves_out_what_the_record_has(tmp_path: Path) -> None:
    file, calls = tmp_path / "figures.jsonl", []
    for expected, words in ((1, ()), (1, ()), (2, ("--again",))):
        report = Report("bench", asked("--json", file, *words))
        if report.missing("cell"):
            calls.append("cell")
            report.add_cell("cell", {"step": Value(2.0, "s"), "peak": Value(8.0, "bytes")})
        assert len(calls) == expected
        assert report.values("cell") == {"step": 2.0, "peak": 8.0}
    assert len(Record(file).rows()) == 4


@pytest.mark.parametrize("other", [{"commit": "bbbb"}, {"cpu": "another"}, {"versions": {"torch": "9"}}])
def test_figures_of_another_commit_or_machine_are_measured(tmp_path: Path, other: dict[str, object]) -> None:
    file = tmp_path / "figures.jsonl"
    Report("bench", asked("--json", file)).add("cell", Value(1.0, "count"))
    (row,) = Record(file).rows()
    assert not Report("bench", asked("--json", file)).missing("cell")
    assert Report("another", asked("--json", file)).missing("cell")
    file.write_text(Row(row.figure, replace(row.machine, **other)).to_json() + "\n")
    assert Report("bench", asked("--json", file)).missing("cell")


def test_a_cell_is_missing_until_its_own_figures_are_there() -> None:
    report = Report("bench", asked())
    report.add("2 ranks, large", Value(1.0, "count"))
    report.add_cell("4 ranks", {"step": Value(1.0, "s")})
    assert report.missing("2 ranks")
    assert not report.missing("4 ranks")


def test_a_sum_over_cells_is_written_again_only_when_it_changed(tmp_path: Path) -> None:
    file = tmp_path / "figures.jsonl"
    for value in (1.0, 1.0, 2.0):
        Report("bench", asked("--json", file)).add("sum", Value(value, "count"))
    assert [row.figure.value for row in Record(file).rows()] == [1.0, 2.0]


def test_readable_lines_have_the_verdict_and_make_way_for_json(capsys: pytest.CaptureFixture[str]) -> None:
    Report("bench", asked()).add("import", Value(0.5, "s", 0.3))
    assert "500 ms  (target 300 ms: MISSED)" in capsys.readouterr().out
    Report("bench", asked("--json", "-")).add("rate", Value(7e6, "per s", 5e6, met=True))
    told = capsys.readouterr()
    assert json.loads(told.out)["name"] == "rate"
    assert "7.00 M/s  (target 5.00 M/s: met)" in told.err


def test_a_target_may_be_for_something_else_than_the_value() -> None:
    assert Value(1.0, "s", 1.0).judged() is True
    assert Value(-2.0, "share", 1.0, met=False).judged() is False
    assert Value(1.0, "s").judged() is None


def test_a_busy_machine_is_said_to_be() -> None:
    assert machine().busy == ""
    assert machine(load_begin=3.5).busy == "load 3.5 on 2 cores"
    assert machine(load_end=9.0, steal=0.25).busy == "load 9.0 on 2 cores, steal 25%"


def test_workers_write_to_the_same_file(tmp_path: Path) -> None:
    given = asked("--json", tmp_path / "figures.jsonl", "--again")
    assert asked(*words_for_workers(given)) == given
    assert words_for_workers(asked()) == []


def test_repeats_leave_the_first_call_out() -> None:
    calls: list[int] = []
    found = timed(lambda: calls.append(1), repeats=3)
    assert len(calls) == 4
    assert found.low <= found.value <= found.high


def test_what_is_current_is_of_one_commit_and_the_newest() -> None:
    rows = [
        Row(Figure("b", name, value, "s"), machine(commit=commit))
        for commit, name, value in (
            ("old", "x", 1.0),
            ("old", "y", 2.0),
            ("new", "x", 3.0),
            ("new", "x", 4.0),
        )
    ]
    assert {name: row.figure.value for (_, name), row in current(rows).items()} == {"x": 4.0}


def test_a_commit_is_followed_by_what_differs_but_for_the_pages(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *identity, *words], check=True, capture_output=True)

    assert commit_of(tmp_path) == "unknown"
    git("init")
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "docs/page.md"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    clean = commit_of(tmp_path)
    (tmp_path / "docs" / "page.md").write_text("2")
    assert commit_of(tmp_path) == clean
    (tmp_path / "code.py").write_text("2")
    assert commit_of(tmp_path).startswith(f"{clean}+")


def test_every_benchmark_has_the_shared_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(SCRIPTS) > 20
    for path in SCRIPTS:
        # Benchmarks import their neighbours, as they do when they are run; the folder is forgotten after.
        monkeypatch.syspath_prepend(str(path.parent))
        name = f"benchmark_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        told = module.options().format_help()
        assert "--json FILE" in told, path
        assert "--again" in told, path


def test_all_that_are_run_one_after_the_other_have_the_shared_options() -> None:
    assert {name for name, *_ in run_all.BENCHMARKS} <= {path.stem for path in SCRIPTS}
