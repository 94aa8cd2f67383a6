"""Calculon on published runs and by the thousand, and Metis' search, beside weft.

    python benchmarks/peer_figures.py

Clone https://github.com/calculon-ai/calculon and https://github.com/SamsungLabs/Metis, and name the clones in
WEFT_CALCULON and WEFT_METIS; WEFT_PEER_PYTHON is a Python with numpy, pandas and psutil, if this one lacks
them. A program that is not named is left out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from figures import Value
from harness import Report, parser
from peer_programs.calculon import Calculon, Question
from peer_programs.metis import Metis
from peer_programs.program import PeerProgram

from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.moves.layout import build_plan, refuse
from weft.planning.planners import PLANNERS, Candidate, Ranking, Verdict
from weft.planning.planners.simulated import simulated
from weft.planning.planners.space import by_count, degree_layouts
from weft.planning.problem import Problem, problem_of
from weft.scoring.measurements import Measurement, read_measurements
from weft.scoring.metrics import spearman
from weft.scoring.score import score
from weft.scoring.subject import Subjects

RUNS = Path(__file__).parents[1] / "examples" / "score" / "korthikanti.csv"
LAYOUTS = 200
# (model, cluster, global batch, tokens)
MIXED = (
    ("gpt2", "8xa100-80gb+8xv100-32gb", 64, 1024),
    ("gpt2", "4xa100-80gb+4xt4", 64, 1024),
    ("gpt-6.6b", "8xa100-80gb+8xv100-32gb", 128, 1024),
)


def program(report: Report, name: str, source: str) -> PeerProgram | None:
    """The clone that the environment names, or None after a line on how to get one."""
    variable = f"WEFT_{name.upper()}"
    root = os.environ.get(variable)
    if root is None:
        report.say(f"{name} is left out: git clone {source}, and set {variable} to the folder")
        return None
    return PeerProgram(name=name, root=Path(root), python=os.environ.get("WEFT_PEER_PYTHON"))


def question_of(row: Measurement, subjects: Subjects) -> Question:
    """A published run of Megatron-LM for Calculon, with the stream of tokens as the run divided it."""
    subject = subjects.of(row)
    assert row.layers is not None
    assert row.hidden is not None
    assert row.heads is not None
    model = ModelConfig(
        name=row.name,
        family=row.family,
        layers=row.layers,
        hidden=row.hidden,
        heads=row.heads,
        key_value_heads=row.heads,
        feed_forward=row.ffn or 4 * row.hidden,
        vocabulary=row.vocab or 51200,
        sequence=row.seq or 2048,
    )
    return Question(
        model=model,
        graph=subject.graph,
        cluster=subject.cluster,
        plan=subject.plan,
        stream="gathered again" if row.sequence_parallel else "whole",
    )


def published(report: Report, judge: Calculon) -> None:
    """Both against the measured steps of eight runs."""
    cell = "published runs"
    if not report.missing(cell):
        return
    rows = read_measurements(RUNS).rows
    subjects = Subjects(folder=RUNS.parent)
    answers = judge.say([question_of(row, subjects) for row in rows.values()])
    predicted, errors = score(RUNS).rows, []
    for (number, row), said in zip(rows.items(), answers, strict=True):
        assert row.measured_step_s is not None
        assert said.step_s is not None, said.reason
        steps = {"weft": predicted[number].step_s, "calculon": said.step_s}
        errors.append([step_s / row.measured_step_s - 1.0 for step_s in steps.values()])
        report.add_cell(
            row.name,
            {
                "measured": Value(row.measured_step_s, "s"),
                **{who: Value(step_s, "s") for who, step_s in steps.items()},
            },
        )
    mean, worst = np.abs(errors).mean(axis=0), np.abs(errors).max(axis=0)
    report.add_cell(
        cell,
        {
            f"{which} error of {who}": Value(error, "share")
            for which, both in (("mean", mean), ("worst", worst))
            for who, error in zip(("weft", "calculon"), both, strict=True)
        },
    )


def layouts(problem: Problem) -> Iterator[Layout]:
    """Degrees that both can say, with nothing or everything recomputed."""
    for degrees in degree_layouts(problem):
        given = by_count(problem, degrees)
        blocks = problem.model.layers
        if blocks % given.pp == 0 and refuse(problem.job, given) is None:
            yield from (given.recomputing(word) for word in ("none", "full"))


def rates(report: Report, judge: Calculon) -> None:
    """Seconds for 1,000 layouts of each, and how alike they rank those that both can say."""
    problem = problem_of(model="gpt-6.6b", on="64xa100-80gb", global_batch=512, precision="bf16")
    job = problem.job
    cell = f"{job.graph.name} on {job.cluster.name}"
    if not report.missing(cell):
        return
    found = list(layouts(problem))[:LAYOUTS]
    # All cut their stages themselves, but for those of one stage.
    equal = (1.0,) * len(job.graph.layers)
    began = time.perf_counter()
    judged = [
        simulated(problem, Candidate(layout=one, verdict=Verdict.PRUNED, reason=""), equal) for one in found
    ]
    weft_s = time.perf_counter() - began
    plans = [build_plan(job, one, equal) for one in found]
    began = time.perf_counter()
    answers = judge.say(
        [Question(model=problem.model, graph=job.graph, cluster=job.cluster, plan=plan) for plan in plans]
    )
    calculon_s = time.perf_counter() - began
    began = time.perf_counter()
    searched = len(PLANNERS["weft"].search(problem).candidates)
    search_s = time.perf_counter() - began
    steps = [
        (one.prediction.step_s, said.step_s)
        for one, said in zip(judged, answers, strict=True)
        if one.prediction is not None and said.step_s is not None
    ]
    ranks = spearman(*np.array(steps, dtype=np.float64).T)
    report.add_cell(
        cell,
        {
            "1,000 layouts simulated": Value(1000.0 * weft_s / len(found), "s"),
            "1,000 layouts, calculon in one process": Value(1000.0 * calculon_s / len(found), "s"),
            "1,000 layouts searched": Value(1000.0 * search_s / searched, "s"),
            "layouts that both can say": Value(len(steps), "count"),
            **({} if ranks is None else {"rank correlation": Value(ranks, "ratio")}),
        },
    )


def full_cost_s(ranking: Ranking) -> float:
    """Simulated step of the plan with the least cost, where the larger cost of a plan counts.

    In its second order of kinds Metis' program prints plans of two stages twice. The first line has the cost
    of one stage only.
    """
    costs: dict[str, float] = {}
    steps: dict[str, float] = {}
    for one in ranking.fitting:
        assert one.estimate_s is not None
        assert one.plan is not None
        assert one.prediction is not None
        name = str(one.layout)
        costs[name] = max(one.estimate_s, costs.get(name, 0.0))
        steps[name] = one.prediction.step_s
    return steps[min(costs, key=lambda name: costs[name])]


def search(report: Report, planner: Metis) -> None:
    """Metis' plans in weft's simulator beside weft's own."""
    for model, on, batch, sequence in MIXED:
        cell = f"{model} on {on}, {batch} samples of {sequence} tokens"
        if report.missing(cell):
            problem = problem_of(model=model, on=on, global_batch=batch, sequence=sequence, precision="fp16")
            report.add_cell(cell, searched_beside(report, planner, problem))


def searched_beside(report: Report, planner: Metis, problem: Problem) -> dict[str, Value]:
    """Steps and searches of both, the regret of Metis' plans, and how many of them weft can say."""
    began = time.perf_counter()
    own = PLANNERS["weft"].search(problem).fitting[0]
    own_s = time.perf_counter() - began
    began = time.perf_counter()
    ranking = planner.search(problem)
    metis_s = time.perf_counter() - began
    best_s = own.step_s
    found = [one for one in ranking.candidates if one.prediction is not None]
    fitting = [one.step_s for one in found if one.verdict is Verdict.FITS]
    form = PLANNERS["metis-form"].search(problem).fitting[0]
    report.say(f"weft: {own.layout}; metis: {ranking.fitting[0].layout}; metis-form: {form.layout}")
    ranks = spearman(*np.array([(one.estimate_s, one.step_s) for one in found], dtype=np.float64).T)
    regrets = {
        "its first plan": fitting[0],
        "its first plan by full cost": full_cost_s(ranking),
        f"the best of its first {len(fitting)}": min(fitting),
        "metis-form": form.step_s,
    }
    return {
        "weft": Value(best_s, "s"),
        "weft's search": Value(own_s, "s"),
        "metis": Value(fitting[0], "s"),
        "metis' search": Value(metis_s, "s"),
        **{f"regret of {whose}": Value(step_s / best_s - 1.0, "share") for whose, step_s in regrets.items()},
        "its plans": Value(len(ranking.candidates), "count"),
        "its plans that weft can say": Value(
            sum(one.estimate_s is not None for one in ranking.candidates), "count"
        ),
        **({} if ranks is None else {"rank correlation": Value(ranks, "ratio")}),
    }


def options() -> argparse.ArgumentParser:
    return parser(__doc__)


def main() -> None:
    report = Report("peer_figures", options().parse_args())
    report.print_machine()
    calculon = program(report, "calculon", "https://github.com/calculon-ai/calculon")
    if calculon is not None:
        judge = Calculon(program=calculon)
        published(report, judge)
        rates(report, judge)
    metis = program(report, "metis", "https://github.com/SamsungLabs/Metis")
    if metis is not None:
        search(report, replace(Metis(program=metis), finalists=24))


if __name__ == "__main__":
    main()
