"""Parameters of every row of the table of decoders: as weft counts them, beside those of `transformers`.

    python benchmarks/decoder_parameters.py               # all rows
    python benchmarks/decoder_parameters.py qwen3 gemma2  # some

Each row is counted, whole and block by block. Counted are the defaults of its class, a tiny model, and one
with the other choices of biases, norms, windows and tied embeddings. Models of `transformers` are built
without memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

from decoder_files import counted, default_config, tiny_config
from harness import Report, parser

from weft.describe.decoder_row import ROWS

CONFIGURATIONS: Mapping[str, Callable[[str], Any]] = {
    "default": default_config,
    "tiny": tiny_config,
    "switched": lambda model_type: tiny_config(model_type, switched=True),
}


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("rows", nargs="*", metavar="MODEL_TYPE", help="default: all rows")
    return made


def main() -> int:
    asked = options().parse_args()
    report, cases, failed = Report("decoder_parameters", asked), 0, 0
    report.print_machine()
    for model_type in asked.rows or ROWS:
        for name, configuration in CONFIGURATIONS.items():
            ours, theirs = counted(configuration(model_type))
            cases += 1
            failed += ours != theirs
            unlike = [place for place, pair in enumerate(zip(ours, theirs, strict=True)) if len({*pair}) > 1]
            verdict = f"{theirs[0]:,} in transformers, unlike in blocks {unlike[1:]}" if unlike else "equal"
            report.say(f"{model_type}, {name}: {ours[0]:,} parameters, {verdict}")
    if not asked.rows:
        report.add_outcome("models of all rows", cases, failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
