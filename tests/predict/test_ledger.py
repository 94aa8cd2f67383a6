from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_writer import record, write_at_once

from weft.errors import InputError
from weft.predict.ledger import Ledger

WRITERS, ENTRIES = 4, 2


def test_honesty_counts_what_was_scored(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for measured in (1.0, 1.9, 2.1, 2.6):
            ledger.score(record(ledger), measured)
        ledger.score(record(ledger, 100.0, "peak_bytes"), 90.0)
        record(ledger, quantity="first_step_s")
        honesty = ledger.honesty()
    assert set(honesty) == {"step_s", "peak_bytes"}
    step = honesty["step_s"]
    assert (step.scored, step.inside) == (4, 0.5)
    assert step.median_error == pytest.approx((2.0 / 1.9 + 2.0 / 2.1) / 2 - 1)
    assert honesty["peak_bytes"].inside == 1.0
    assert honesty["peak_bytes"].median_error == pytest.approx(1 / 0.9 - 1)


def test_entries_outlive_the_process_that_made_them(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.sqlite"
    with Ledger(path) as ledger:
        entry = record(ledger)
    with Ledger(path) as ledger:
        ledger.score(entry, 2.0)
    with Ledger(path) as ledger:
        assert ledger.honesty()["step_s"].scored == 1


def test_the_ledger_lies_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    with Ledger() as ledger:
        record(ledger)
    assert (tmp_path / "home" / "ledger.sqlite").is_file()


def test_processes_open_and_write_at_once_and_lose_nothing(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.sqlite" for number in range(30)]
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(WRITERS)
    writers = [context.Process(target=write_at_once, args=(paths, ENTRIES, start)) for _ in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    for path in paths:
        with Ledger(path) as ledger:
            assert ledger.honesty()["step_s"].scored == WRITERS * ENTRIES


@pytest.mark.parametrize("change", [{"low": 0.0}, {"low": 3.0}, {"high": 1.0}, {"predicted": float("nan")}])
def test_an_interval_that_is_none_is_refused(tmp_path: Path, change: dict[str, float]) -> None:
    values = {"predicted": 2.0, "low": 1.8, "high": 2.2, **change}
    with Ledger(tmp_path / "ledger.sqlite") as ledger, pytest.raises(InputError, match="interval"):
        ledger.record_prediction(quantity="step_s", subject="plan", source="", time_s=0.0, **values)


def test_an_entry_is_scored_once(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        entry = record(ledger)
        with pytest.raises(InputError, match="positive"):
            ledger.score(entry, 0.0)
        ledger.score(entry, 2.0)
        for again in (entry, entry + 1):
            with pytest.raises(InputError, match="already scored"):
                ledger.score(again, 2.0)


@given(st.binary(min_size=1, max_size=200), st.booleans())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_that_is_no_ledger_is_refused_and_left_alone(
    tmp_path: Path, junk: bytes, header: bool
) -> None:
    path = tmp_path / "junk.sqlite"
    content = (b"SQLite format 3\x00" if header else b"weft") + junk
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a usable ledger"):
        Ledger(path)
    assert path.read_bytes() == content


def test_a_folder_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a usable ledger"):
        Ledger(tmp_path)
