"""What a commit changed: ratios, noise, and targets that were lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from compare import Change, changes
from figures import Figure, Machine, Record, Row, Value

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compare.py"


def row(name: str, value: Value, commit: str = "aaaa") -> Row:
    where = Machine("a processor", 2, "Linux 6", {"weft": "0.1.0"}, commit, "2026-11-23", 0.5, 0.5, 0.0)
    return Row(Figure.of("bench", name, value), where)


def change(before: Value, after: Value) -> Change:
    (only,) = changes([row("x", before)], [row("x", after, "bbbb"), row("y", after, "bbbb")])
    return only


@pytest.mark.parametrize(
    ("before", "after", "outside"),
    [((0.9, 1.1), (1.0, 1.4), False), ((0.9, 1.1), (1.15, 1.4), True), ((1.2, 1.3), (1.0, 1.1), True)],
)
def test_intervals_that_meet_are_noise(
    before: tuple[float, float], after: tuple[float, float], outside: bool
) -> None:
    found = change(
        Value(1.0, "s", low=before[0], high=before[1]), Value(1.2, "s", low=after[0], high=after[1])
    )
    assert found.ratio == 1.2
    assert found.outside is outside


def test_without_an_interval_the_noise_is_unknown() -> None:
    assert change(Value(1.0, "s"), Value(9.0, "s", low=8.0, high=10.0)).outside is None


def test_nothing_has_a_ratio_to_zero() -> None:
    assert change(Value(0.0, "count"), Value(1.0, "count")).ratio is None


def compared(tmp_path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *words, "--record", tmp_path / "figures.jsonl"]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def test_a_lost_target_ends_with_one(tmp_path: Path) -> None:
    before, after = Record(tmp_path / "before"), Record(tmp_path / "after")
    before.append([row("x", Value(0.2, "s", 0.3)), row("gone", Value(1.0, "s"))])
    after.append([row("x", Value(0.4, "s", 0.3))])
    lost = compared(tmp_path, before.path, after.path)
    assert lost.returncode == 1
    assert "200 ms       400 ms    2.000  noise unknown, TARGET LOST" in lost.stdout
    assert f"only in {before.path}: bench: gone" in lost.stdout
    assert lost.stdout.endswith("1 figures, 1 targets lost\n")
    back = compared(tmp_path, after.path, before.path)
    assert back.returncode == 0
    assert "target reached" in back.stdout


def test_two_commits_of_one_record(tmp_path: Path) -> None:
    Record(tmp_path / "figures.jsonl").append(
        [row("x", Value(1.0, "s"), "aaaa11"), row("x", Value(2.0, "s"), "bbbb22")]
    )
    found = compared(tmp_path, "aaaa", "bbbb")
    assert found.returncode == 0
    assert "1.00 s       2.00 s    2.000" in found.stdout
    missing = compared(tmp_path, "aaaa", "cccc")
    assert missing.returncode == 2
    assert "no figures of cccc" in missing.stderr
    assert "Traceback" not in missing.stderr
