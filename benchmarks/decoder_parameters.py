"""Parameters of every row of the table of decoders: as weft counts them, less those of `transformers`.

    python benchmarks/decoder_parameters.py               # all rows
    python benchmarks/decoder_parameters.py qwen3 gemma2  # some

Each row is counted for the defaults of its class, for a tiny model, and for one with the other choices of
biases, norms, windows and tied embeddings. Models of `transformers` are built without memory.
"""

from __future__ import annotations

import argparse
import sys

from decoder_files import counted, default_config, tiny_config
from figures import Value
from harness import Report, parser

from weft.describe.decoder_row import ROWS

CONFIGURATIONS = {
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
    report, wrong = Report("decoder_parameters", asked), 0
    report.print_machine()
    for model_type in asked.rows or ROWS:
        differences = 0
        for name, configuration in CONFIGURATIONS.items():
            ours, theirs = counted(configuration(model_type))
            differences += abs(ours - theirs)
            if ours != theirs:
                report.say(f"{model_type}, {name}: {ours} parameters, {theirs} in transformers")
        report.add(f"{model_type}: parameters that differ", Value(differences, "count", 0.0))
        wrong += differences > 0
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
