"""`metrics.csv` and `held_out.csv` in the run directory: one row per step, also after kills and resumes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from weft.files import write_whole
from weft.training.loggers.feed import Opening, Record, is_held_out

STEP_COLUMNS = (
    "step",
    "loss",
    "learning_rate",
    "tokens_per_s",
    "step_s",
    "predicted_step_s",
    "epoch",
    "time_s",
    "max_rss_bytes",
)
HELD_OUT_COLUMNS = ("step", "held_out_loss")


class CsvLogger:
    """A logger into CSV files; earlier rows come from the run's own records, without gaps or duplicates."""

    def __init__(self, opening: Opening) -> None:
        self._steps = _Table(opening.run_dir / "metrics.csv", STEP_COLUMNS, opening.steps)
        self._held_out = _Table(opening.run_dir / "held_out.csv", HELD_OUT_COLUMNS, opening.held_out)

    def log(self, record: Record) -> None:
        (self._held_out if is_held_out(record) else self._steps).add(record)

    def flush(self) -> None:
        """Do nothing: `log` writes every row at once."""

    def finish(self) -> None:
        """Do nothing."""


class _Table:
    """A file of rows with rising steps; other columns follow the known ones in the order of their names."""

    def __init__(self, path: Path, columns: Sequence[str], records: Iterable[Record]) -> None:
        self._path = path
        self._known = tuple(columns)
        self._records = list(records)
        self._write()

    def add(self, record: Record) -> None:
        """Append a row; if its step is not new, it replaces that step's row and all later rows."""
        redone = bool(self._records) and record["step"] <= self._records[-1]["step"]
        if redone:
            self._records = [kept for kept in self._records if kept["step"] < record["step"]]
        self._records.append(record)
        if redone or not set(record) <= set(self._columns):
            self._write()
        else:
            with open(self._path, "a", encoding="utf-8", newline="") as file:
                file.write(self._text([record]))

    def _write(self) -> None:
        others = {name for record in self._records for name in record} - set(self._known)
        self._columns = (*self._known, *sorted(others))
        write_whole(self._path, ",".join(self._columns) + "\n" + self._text(self._records))

    def _text(self, records: Iterable[Record]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(records)
        return text.getvalue()
