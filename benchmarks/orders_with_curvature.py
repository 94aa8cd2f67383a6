"""Predicted steps of BERT in four stages, by order, without K-FAC and with it in the bubbles.

A step has one micro-batch of 32 samples of 128 tokens for each stage, in fp32, with NVLAMB. `busy` is the
share of time in which devices compute. `pays below` is the best step of any order without K-FAC over the step
with it: K-FAC saves time where it needs less than this share of the steps. An order whose devices cannot hold
K-FAC has its step alone.

    python benchmarks/orders_with_curvature.py    # about two minutes
"""

from __future__ import annotations

import argparse
from typing import Any

from figures import Value
from harness import Report, parser

from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.methods.bubble_filling.report import Filled
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob

MODELS = ("bert-base", "bert-large")
DEVICES = ("p100-16gb", "a100-80gb", "h100-80gb")
# With the stages on each device.
ORDERS = {"gpipe": 1, "1f1b": 1, "breadth-first": 3, "chimera": 1, "zb-h1": 1, "zb-v": 2}
STAGES, SAMPLES = 4, 32


def planned(model: str, device: str, order: str, *, curvature: bool) -> PlannedJob:
    tables: dict[str, Any] = {
        "model": {"preset": model},
        "task": {"kind": "masked-lm", "sequence": 128},
        "train": {"global_batch": SAMPLES * STAGES, "steps": 1000, "precision": "fp32"},
        "optimizer": {"name": "nvlamb"},
        "cluster": {"use": f"{STAGES}x{device}"},
        "plan": {
            "pp": STAGES,
            "dp": 1,
            "micro_batch_size": SAMPLES,
            "sharding": "zero-0",
            "schedule": order,
            "loops": ORDERS[order],
        },
    }
    if curvature:
        tables |= {"kfac": {}, "bubble": {"work": ["kfac"]}, "goal": {"contract": "empirical"}}
    return plan_run(parse_run(tables))


def measure(report: Report, model: str, device: str) -> None:
    names = {order: f"{model}, {device}; {order}" for order in ORDERS}
    if not any(report.missing(name) for name in names.values()):
        return
    plain = {order: planned(model, device, order, curvature=False) for order in ORDERS}
    least_s = min(one.prediction.step_s for one in plain.values())
    for order, name in names.items():
        try:
            job = planned(model, device, order, curvature=True)
        except InputError as error:
            report.say(f"{name}, with K-FAC: {error.violations[0]}")
            report.add_cell(name, {"step": Value(plain[order].prediction.step_s, "s")})
            continue
        filled = Filled.of(job)
        assert filled is not None, "the plan fills bubbles"
        figures = {
            "step": Value(plain[order].prediction.step_s, "s"),
            "with K-FAC": Value(job.prediction.step_s, "s"),
            "added by work": Value(filled.added_s, "s"),
            "fewest steps": Value(min(filled.steps), "count"),
            "most steps": Value(max(filled.steps), "count"),
            "busy": Value(filled.busy_before, "share"),
            "busy with K-FAC": Value(filled.busy, "share"),
            "pays below": Value(least_s / job.prediction.step_s, "share"),
        }
        report.add_cell(name, figures)


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("orders_with_curvature", options().parse_args())
    report.print_machine()
    for model in MODELS:
        for device in DEVICES:
            measure(report, model, device)


if __name__ == "__main__":
    main()
