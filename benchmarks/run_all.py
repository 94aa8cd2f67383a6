"""Run every benchmark of this folder, one after the other, each in its own process.

Figures go to one file, benchmarks/figures.jsonl unless `--json` names another. Run again, it continues; of
another commit it measures everything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from harness import parser, words_for_workers
from tables import RECORD

# Each with the words of its own.
BENCHMARKS = (
    ("start_up",),
    ("first_answer",),
    ("first_step",),
    ("programs",),
    ("simulator",),
    ("planners",),
    ("scored_rows",),
    ("graph_planners",),
    ("bubbles",),
    ("orders_with_curvature",),
    ("decoder_parameters",),
    ("peer_figures",),
    ("graph_peers",),
    ("placement",),
    ("placed_training",),
    ("placement_peer",),
    ("recorder",),
    ("watching",),
    ("sync_codecs",),
    ("codec_queues",),
    ("codec_queues",),
    ("prediction",),
    ("collective_ranks",),
    ("tracked_memory",),
    ("loss_head",),
    ("experts",),
    ("expert_moves",),
    ("tensor_ranks",),
    ("tensor_collectives",),
    ("few_bits_at_scale",),
    ("rates",),
    ("sync_quality",),
    ("sleep_compute",),
    ("graph_runtime",),
    ("graph_runtime", "--ranks", "8"),
    ("graph_runtime", "--ranks", "2"),
    ("filled_bubbles",),
    ("slow_link",),
    ("sync_links",),
    ("expert_links",),
    ("lab_plans",),
    ("server_sums",),
    ("executor_vs_torch",),
    ("replicas_vs_torch",),
    ("transports",),
    ("training_beside",),
    ("curvature",),
    ("taps",),
    ("taps", "--micro-batch-size", "4"),
    ("taps", "--method", "micro-batch-clipping"),
    ("taps", "--method", "micro-batch-clipping", "--micro-batch-size", "8"),
    ("taps", "mixtral-1m", "--method", "expert-balance", "--schedule", "gpipe"),
    ("taps", "mixtral-1m", "--method", "expert-balance", "--schedule", "gpipe", "--micro-batch-size", "8"),
    ("equality_matrix",),
    ("restore_matrix",),
    ("kill_matrix",),
    ("node_losses",),
    ("doors_in_stacks",),
    ("public_configurations",),
    ("cluster_lists",),
)


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.set_defaults(json=str(RECORD))
    return made


def main() -> int:
    shared = words_for_workers(options().parse_args())
    folder, failed = Path(__file__).parent, []
    for name, *words in BENCHMARKS:
        print(f"\n== {' '.join((name, *words))}", file=sys.stderr, flush=True)
        command = [sys.executable, str(folder / f"{name}.py"), *words, *shared]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
