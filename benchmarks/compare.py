"""What a commit changed: the figures of two records, or of two commits in one record.

    python benchmarks/compare.py before.jsonl after.jsonl
    python benchmarks/compare.py 2b48144 54f83e5          # commits in benchmarks/figures.jsonl

The exit code is 1 when a target was met before and is missed after.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Record, Row, current, shown
from tables import RECORD


@dataclass(frozen=True, slots=True)
class Change:
    """One figure before and after."""

    before: Row
    after: Row

    @property
    def ratio(self) -> float | None:
        before = self.before.figure.value
        return self.after.figure.value / before if before else None

    @property
    def outside(self) -> bool | None:
        """Whether the intervals, or the spreads of repeats, do not meet; None where one has none."""
        one, other = self.before.figure, self.after.figure
        if one.low is None or one.high is None or other.low is None or other.high is None:
            return None
        return one.high < other.low or other.high < one.low

    @property
    def lost(self) -> bool:
        """Whether a target was met, and is not any more."""
        return self.before.figure.met is True and self.after.figure.met is False

    def __str__(self) -> str:
        one, other = self.before.figure, self.after.figure
        words = {True: "outside of the noise", False: "within the noise", None: "noise unknown"}
        said = [words[self.outside]]
        if self.lost:
            said.append("TARGET LOST")
        if one.met is False and other.met is True:
            said.append("target reached")
        if self.before.machine.busy or self.after.machine.busy:
            said.append("busy machine")
        ratio = "-" if self.ratio is None else f"{self.ratio:.3f}"
        name = f"{one.benchmark}: {one.name}"
        values = f"{shown(one.value, one.unit):>12} {shown(other.value, other.unit):>12}"
        return f"{name:<76} {values} {ratio:>8}  {', '.join(said)}"


def rows_of(asked: str, record: Path) -> list[Row]:
    """The rows of a record, or those of the commits in `record` whose names begin so."""
    if Path(asked).exists():
        return Record(Path(asked)).rows()
    return [row for row in Record(record).rows() if row.machine.commit.startswith(asked)]


def changes(before: Sequence[Row], after: Sequence[Row]) -> Iterator[Change]:
    """Figures that both have, in the order of the second."""
    old = current(before)
    for name, row in current(after).items():
        if name in old:
            yield Change(old[name], row)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", metavar="A", help="a record, or a commit")
    parser.add_argument("after", metavar="B", help="a record, or a commit")
    parser.add_argument("--record", type=Path, default=RECORD, help="where commits are looked for")
    asked = parser.parse_args()
    sides = [rows_of(one, asked.record) for one in (asked.before, asked.after)]
    for name, rows in zip((asked.before, asked.after), sides, strict=True):
        if not rows:
            parser.error(f"no figures of {name}: it is no record, and {asked.record} has no such commit")
    found = list(changes(*sides))
    print(f"{'':<76} {'before':>12} {'after':>12} {'ratio':>8}")
    for change in found:
        print(change)
    before, after = (set(current(rows)) for rows in sides)
    for word, names in ((asked.before, before - after), (asked.after, after - before)):
        for benchmark, name in sorted(names):
            print(f"only in {word}: {benchmark}: {name}")
    if any(one.before.machine.place != one.after.machine.place for one in found):
        print("some figures come from unlike machines or versions")
    lost = sum(change.lost for change in found)
    print(f"{len(found)} figures, {lost} targets lost")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
