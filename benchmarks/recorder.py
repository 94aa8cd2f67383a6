"""Cost of recording one instruction, against a 10 ms step of 100 instructions."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from figures import Value
from harness import Report, parser, timed
from programs import build

from weft.program.rank_program import part_of
from weft.run.record.recorder import Recorder

RECORDS = 10_000
INSTRUCTIONS_PER_STEP = 100
STEP_S = 10e-3
TARGET = 0.01


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("recorder", options().parse_args())
    report.print_machine()
    if report.missing("one record"):
        report.add("one record", one_record())
    if report.missing(share := f"share of a step of 10 ms and {INSTRUCTIONS_PER_STEP} instructions"):
        found = INSTRUCTIONS_PER_STEP * report.value("one record") / STEP_S
        report.add(share, Value(found, "share", target=TARGET))


def one_record() -> Value:
    """Seconds of one, from many."""
    program = build()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), program=part_of(program, 0), plan_id="0" * 16, steps=4)

        def record_many() -> None:
            for position in range(RECORDS):
                recorder.record(0, position % 1000, 1, 2, 3)

        many = timed(record_many)
        recorder.close()
    return many.changed(lambda seconds: seconds / RECORDS)


if __name__ == "__main__":
    main()
