"""A small language model, trained with K-FAC in the bubbles of a pipeline, beside first-order optimizers.

python language.py [--causal] [--long] [--quick] [--json FILE]

Four blocks, 64 wide, read bytes of Python's standard library: BERT with masks, or GPT with `--causal`. K-FAC
treats the linear layers of blocks, as in `digits.py`. Its rate and damping are tuned on the pipeline, whose
inverses are older than those of one process.

The last table multiplies steps to a loss with the predicted steps of BERT-Base in four stages. Each arm has
the order that `weft plan` finds best for it on a device. So the table joins losses of a small model with
times of a large one, and windows there may be longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from digits import CLUSTER
from studies import Effort, Finalist, Grid, Study, as_json, report
from trainings import Arm, Job, planned

from weft.planning.planned_job import PlannedJob

WIDTH, BLOCKS, HEADS, VOCABULARY, SEQUENCE = 64, 4, 4, 260, 32
EVERY, TUNED_ON = 3, 4
SHORT = Effort(150, 1, 3, 2, (4,), 2)
LONG = Effort(400, 2, 5, 4, (4,), 2)
QUICK = Effort(4, 1, 1, 0, (), 1)
SAMPLES, LONG_SAMPLES, MICRO_BATCHES = 64, 256, 4
FIRST = (
    Grid(Arm("adamw", 0.0), (3e-3, 9e-3, 2.7e-2)),
    Grid(Arm("muon", 0.0), (9e-3, 2.7e-2, 8.1e-2)),
    Grid(Arm("nvlamb", 0.0), (9e-3, 2.7e-2, 8.1e-2)),
)
SECOND = (Grid(Arm("nvlamb", 0.0), (9e-3, 2.7e-2, 8.1e-2), (1e-3, 3e-3, 9e-3)),)
DEVICES = ("p100-16gb", "v100-16gb", "a100-80gb", "h100-80gb")


def study_in(folder: Path, causal: bool, samples: int) -> Study:
    """The study of one model, whose configuration and data lie in the folder."""
    own, cluster = folder / "small", folder / "cluster.toml"
    own.mkdir()
    cluster.write_text(CLUSTER)
    gpt = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": HEADS, "n_positions": SEQUENCE, "model_type": "gpt2"}
    bert = {
        "model_type": "bert",
        "hidden_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * WIDTH,
        "max_position_embeddings": SEQUENCE,
    }
    (own / "config.json").write_text(json.dumps({**(gpt if causal else bert), "vocab_size": VOCABULARY}))
    job = Job(str(own), "causal-lm" if causal else "masked-lm", str(folder), "python-stdlib")
    tables = {"model": {"hf": str(own)}, "task": {"kind": job.task, "data": job.data}}
    return Study(job, tables, samples, samples // MICRO_BATCHES, EVERY, cluster, TUNED_ON)


def large(device: str, optimizer: str, *, curvature: bool) -> PlannedJob:
    """The best order of BERT-Base in four stages with four micro-batches of 32 samples."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"preset": "bert-base"},
        "task": {"kind": "masked-lm", "sequence": 128},
        "train": {"global_batch": 128, "steps": 1000, "precision": "fp32"},
        "optimizer": {"name": optimizer},
        "cluster": {"use": f"4x{device}"},
        "plan": {"pp": 4, "dp": 1, "micro_batch_size": 32, "sharding": "zero-0"},
    }
    if curvature:
        tables |= {"kfac": {}, "bubble": {"work": ["kfac"]}, "goal": {"contract": "empirical"}}
    return planned(tables)


def times(found: Sequence[Finalist], goals: Sequence[str]) -> Iterator[str]:
    """Simulated time to the final loss of each goal, as a share of the goal's own time."""
    yield "| device | arm | goal | predicted step, goal | predicted step | steps | simulated time |"
    yield "|---|---|---|---|---|---|---|"
    for device in DEVICES:
        for name in goals:
            goal = next(one for one in found if one.arm.name == name)
            base = large(device, goal.arm.optimizer, curvature=False)
            for one in found:
                if one.arm.damping is None or one.where == "one process":
                    continue
                job = large(device, one.arm.optimizer, curvature=True)
                steps = one.steps_to(goal)
                if None in steps:
                    yield f"| {device} | {one.label} | {name} | | | never by some seeds | |"
                    continue
                share = statistics.fmean(map(float, steps)) / len(goal.losses[0])
                orders = [each.plan.schedule.name for each in (base, job)]
                seconds = [each.predicted.simulation.step_s for each in (base, job)]
                cells = [f"{1e3 * took:.1f} ms, {order}" for took, order in zip(seconds, orders, strict=True)]
                time = share * seconds[1] / seconds[0]
                yield f"| {device} | {one.label} | {name} | {' | '.join(cells)} | {share:.0%} | {time:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--causal", action="store_true", help="GPT, which predicts the next byte")
    parser.add_argument("--long", action="store_true", help="256 samples a step, 400 steps, more seeds")
    parser.add_argument("--quick", action="store_true", help="a few steps of few arms, untuned")
    parser.add_argument("--json", type=Path, help="write all curves to this file")
    given = parser.parse_args()
    grids, effort = (*FIRST, *SECOND), LONG if given.long else SHORT
    if given.quick:
        grids, effort = tuple(Grid(one.arm, one.rates[:1], one.dampings[:1]) for one in grids), QUICK
    with tempfile.TemporaryDirectory() as folder:
        study = study_in(Path(folder), given.causal, LONG_SAMPLES if given.long else SAMPLES)
        found = study.run(grids, effort)
    goals = ("nvlamb", "adamw")
    print(*report(found, goals), sep="\n")
    print("", *times(found, goals), sep="\n")
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(found)))


if __name__ == "__main__":
    main()
