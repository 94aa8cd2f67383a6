"""Seconds of a core that `weft score` takes for 1,000 different rows of Llama 13 to 65 B on 128 A100.

They have pipelines of up to 16 devices, and up to 2,048 micro-batches.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice, product
from pathlib import Path

from figures import Value
from harness import Report, parser

from weft.scoring.score import score

ROWS, TARGET_S = 1000, 20.0
# Layers, hidden, heads.
MODELS = ((40, 5120, 40), (60, 6656, 52), (80, 8192, 64))


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("scored_rows", options().parse_args())
    report.print_machine()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        rows = list(islice(different_rows(), ROWS))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        start = time.process_time()
        scores = score(path)
        seconds = time.process_time() - start
    report.add("rows scored", Value(len(scores.rows), "", ROWS, met=len(scores.rows) == ROWS))
    report.add(f"{ROWS} rows", Value(seconds, "s", TARGET_S))


def different_rows() -> Iterator[Mapping[str, object]]:
    """Yield rows that differ in model, layout or kernels."""
    settings = product(
        (1, 2, 4, 8),
        MODELS,
        (1, 2, 4, 8, 16),
        (1, 2, 4, 8),
        ("none", "selective", "full"),
        ("unfused", "fused"),
    )
    for size, (layers, hidden, heads), pp, tp, recompute, norm in settings:
        # Tensor ranks divide heads.
        if heads % tp == 0:
            yield {
                "family": "llama",
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "seq": 2048,
                "global_batch": 2048,
                "pp": pp,
                "tp": tp,
                "micro_batch_size": size,
                "recompute": recompute,
                "norm": norm,
                "gpu": "a100-80gb",
                "gpus_per_node": 8,
                "nodes": 16,
                "measured_step_s": 10.0,
            }


if __name__ == "__main__":
    main()
