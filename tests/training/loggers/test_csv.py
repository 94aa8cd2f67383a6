"""The CSV files: stable columns, one row per step, whole after anything."""

import csv
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from opened_runs import opening_of, record_of

from weft.training.loggers.csv import STEP_COLUMNS, CsvLogger


def rows(run_dir: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    with open(run_dir / name, newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_is_there_when_it_was_logged(tmp_path: Path) -> None:
    logger = CsvLogger(opening_of(tmp_path))
    assert (tmp_path / "metrics.csv").read_text() == ",".join(STEP_COLUMNS) + "\n"
    logger.log(record_of(0))
    logger.log(record_of(1))
    assert [{key: float(value) for key, value in row.items()} for row in rows(tmp_path)] == [
        dict(record_of(step)) for step in range(2)
    ]


def test_what_a_task_measures_besides_gets_columns_of_its_own(tmp_path: Path) -> None:
    logger = CsvLogger(opening_of(tmp_path))
    logger.log({"step": 0, "held_out_loss": 2.5})
    logger.log({"step": 4, "held_out_loss": 1.5, "held_out_accuracy": 0.75})
    assert rows(tmp_path, "held_out.csv") == [
        {"step": "0", "held_out_loss": "2.5", "held_out_accuracy": ""},
        {"step": "4", "held_out_loss": "1.5", "held_out_accuracy": "0.75"},
    ]
    assert rows(tmp_path) == []


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=5), st.integers(0, 40)
)
def test_any_starts_and_kills_leave_every_step_once(
    tmp_path_factory, starts: list[tuple[int, int, bool]], torn: int
) -> None:
    """A start goes on from a checkpoint and logs some steps; the logger may miss the last ones."""
    run_dir, journal = tmp_path_factory.mktemp("run"), {}
    for number, (checkpoint, steps, late) in enumerate(starts):
        first = min(checkpoint, len(journal))
        kept = tuple(journal[step] for step in range(first))
        logger = CsvLogger(opening_of(run_dir, steps=kept, first_step=first))
        done = [record_of(step, loss=100.0 * number + step) for step in range(first, first + steps)]
        journal = {record["step"]: record for record in (*kept, *done)}
        for record in done[: len(done) - late]:
            logger.log(record)
        with open(run_dir / "metrics.csv", "a") as file:
            file.write("9,9.0,0.1,10"[: torn // 4])
    CsvLogger(opening_of(run_dir, steps=tuple(journal.values()), first_step=len(journal)))
    assert [float(row["loss"]) for row in rows(run_dir)] == [record["loss"] for record in journal.values()]
    assert [int(row["step"]) for row in rows(run_dir)] == list(range(len(journal)))


def test_a_step_logged_again_takes_the_place_of_the_old_ones(tmp_path: Path) -> None:
    logger = CsvLogger(opening_of(tmp_path))
    for step, loss in ((0, 1.0), (1, 2.0), (2, 3.0), (1, 4.0)):
        logger.log(record_of(step, loss))
    assert [row["loss"] for row in rows(tmp_path)] == ["1.0", "4.0"]
