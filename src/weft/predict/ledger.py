"""The ledger: every prediction of weft, and its measured value.

It is one SQLite file in the user's data folder. Entries are never rewritten, and an entry is scored once.
Several runs may open and write it at once. So it keeps SQLite's own journal. Of two processes that turn on
write-ahead logging in a new file, one fails at once, whatever its timeout.
"""

from __future__ import annotations

import sqlite3
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.errors import InputError, Violation
from weft.files import weft_home
from weft.timeline.figures import prediction_error

BUSY_TIMEOUT_S = 30.0
# The quantity that every run records: seconds of a steady step.
STEP = "step_s"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS predictions (
    entry INTEGER PRIMARY KEY,
    quantity TEXT NOT NULL,
    subject TEXT NOT NULL,
    source TEXT NOT NULL,
    predicted REAL NOT NULL,
    low REAL NOT NULL,
    high REAL NOT NULL,
    time_s REAL NOT NULL,
    measured REAL
)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A prediction with its measured value; see `Ledger.record_prediction`."""

    quantity: str
    subject: str
    source: str
    predicted: float
    low: float
    high: float
    measured: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Honesty:
    """The accuracy of the predictions of one quantity so far.

    Attributes:
        scored: number of predictions with a measured value.
        inside: share of them with the measured value inside the interval.
        median_error: median of the predictions' relative errors; 0 is unbiased.
    """

    scored: int
    inside: float
    median_error: float


class Ledger:
    """The ledger as a context manager; `path` defaults to `ledger.sqlite` in `weft_home()`.

    Raises:
        InputError: when the file is not a ledger or cannot be opened.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path if path is not None else weft_home() / "ledger.sqlite"
        with self._readable():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Autocommit: each statement below is one transaction.
            self._connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            with self._readable():
                self._connection.execute(_SCHEMA)
        except InputError:
            self._connection.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def record_prediction(
        self,
        *,
        quantity: str,
        subject: str,
        predicted: float,
        low: float,
        high: float,
        source: str,
        time_s: float,
    ) -> int:
        """Record a prediction and return the number of its entry.

        Args:
            quantity: the predicted quantity, with its unit: `step_s`, `peak_bytes`, ...
            subject: the subject of the prediction, such as a plan id.
            predicted, low, high: the value and the ends of its 90 % interval.
            source: the basis of the prediction.
            time_s: time of the prediction, in seconds since 1970.

        Raises:
            InputError: unless 0 < low <= predicted <= high.
        """
        if not 0.0 < low <= predicted <= high < float("inf"):
            problem = f"{quantity}: {low:g} <= {predicted:g} <= {high:g} is not a positive, ordered interval"
            raise InputError(Violation("ledger", problem))
        values = (quantity, subject, source, predicted, low, high, time_s)
        with self._readable():
            cursor = self._connection.execute(
                "INSERT INTO predictions (quantity, subject, source, predicted, low, high, time_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                values,
            )
        assert cursor.lastrowid is not None, "an insertion has a row"
        return cursor.lastrowid

    def score(self, entry: int, measured: float) -> None:
        """Record the measured value of an entry.

        Raises:
            InputError: when there is no such entry, it is scored already, or the value is not positive.
        """
        if not 0.0 < measured < float("inf"):
            raise InputError(Violation("ledger", f"entry {entry}: {measured} is not a positive measurement"))
        with self._readable():
            changed = self._connection.execute(
                "UPDATE predictions SET measured = ? WHERE entry = ? AND measured IS NULL", (measured, entry)
            ).rowcount
        if changed != 1:
            raise InputError(Violation("ledger", f"entry {entry} does not exist or is already scored"))

    def scored(self) -> tuple[Entry, ...]:
        """Return all scored predictions, by quantity and in the order of prediction."""
        with self._readable():
            rows = self._connection.execute(
                "SELECT quantity, subject, source, predicted, low, high, measured FROM predictions "
                "WHERE measured IS NOT NULL ORDER BY quantity, entry"
            ).fetchall()
        names = ("quantity", "subject", "source", "predicted", "low", "high", "measured")
        return tuple(Entry(**dict(zip(names, row, strict=True))) for row in rows)

    def honesty(self) -> Mapping[str, Honesty]:
        """Return the accuracy of all scored predictions, by quantity."""
        scores: dict[str, list[tuple[bool, float]]] = defaultdict(list)
        for one in self.scored():
            inside = one.low <= one.measured <= one.high
            scores[one.quantity].append((inside, prediction_error(one.predicted, one.measured)))
        return {
            quantity: Honesty(
                scored=len(pairs),
                inside=sum(inside for inside, _ in pairs) / len(pairs),
                median_error=statistics.median(error for _, error in pairs),
            )
            for quantity, pairs in scores.items()
        }

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Raise every error of the file as an InputError of one line for its owner."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            problem = f"is not a usable ledger ({error}); move it away to start a new one"
            raise InputError(Violation(str(self.path), problem)) from None
