"""Cost of recording one instruction, against a 10 ms step of 100 instructions."""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness import median_s, print_machine
from programs import build

from weft.program.rank_program import part_of
from weft.run.record.recorder import Recorder

RECORDS = 10_000
INSTRUCTIONS_PER_STEP = 100
STEP_S = 10e-3


def main() -> None:
    print_machine()
    program = build()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), program=part_of(program, 0), plan_id="0" * 16, steps=4)

        def record_many() -> None:
            for position in range(RECORDS):
                recorder.record(0, position % 1000, 1, 2, 3)

        one_s = median_s(record_many) / RECORDS
        recorder.close()
    share = INSTRUCTIONS_PER_STEP * one_s / STEP_S
    verdict = "met" if share < 0.01 else "MISSED"
    print(f"{one_s * 1e6:.2f} us per record, {share:.2%} of the step (target 1 %: {verdict})")


if __name__ == "__main__":
    main()
