"""Other people's programs beside weft: on a question of your own, or on those of docs/benchmarks.md.

    python benchmarks/peers.py gpt2 --on 16xa100-80gb --compare weft,uniform --calculon FOLDER --metis FOLDER
    python benchmarks/peers.py

The first form compares the plans of planners; --help has its options. The second form takes Calculon on
published runs and by the thousand, and Metis' search. Clone https://github.com/calculon-ai/calculon and
https://github.com/SamsungLabs/Metis, and name the clones in WEFT_CALCULON and WEFT_METIS; WEFT_PEER_PYTHON is
a Python with numpy, pandas and psutil, if this one lacks them. What is not named is left out.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import print_machine
from peer_programs.calculon import Calculon, Question
from peer_programs.command import run
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


def program(name: str, source: str) -> PeerProgram | None:
    """The clone that the environment names, or None after a line on how to get one."""
    variable = f"WEFT_{name.upper()}"
    root = os.environ.get(variable)
    if root is None:
        print(f"{name} is left out: git clone {source}, and set {variable} to the folder")
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


def published(judge: Calculon) -> None:
    """Both against the measured steps of eight runs."""
    rows = read_measurements(RUNS).rows
    subjects = Subjects(folder=RUNS.parent)
    answers = judge.say([question_of(row, subjects) for row in rows.values()])
    weft = score(RUNS).rows
    errors = []
    print(f"{'run':<16}{'measured':>10}{'weft':>10}{'':>9}{'calculon':>10}")
    for (number, row), said in zip(rows.items(), answers, strict=True):
        assert row.measured_step_s is not None
        assert said.step_s is not None, said.reason
        both = [step_s / row.measured_step_s - 1.0 for step_s in (weft[number].step_s, said.step_s)]
        errors.append(both)
        words = "".join(
            f"{step_s:>8.2f} s{error:>+8.1%} "
            for step_s, error in zip((weft[number].step_s, said.step_s), both, strict=True)
        )
        print(f"{row.name:<16}{row.measured_step_s:>8.2f} s{words}")
    mean, worst = np.abs(errors).mean(axis=0), np.abs(errors).max(axis=0)
    print(f"mean error: weft {mean[0]:.1%}, calculon {mean[1]:.1%}; worst: {worst[0]:.1%}, {worst[1]:.1%}")


def layouts(problem: Problem) -> Iterator[Layout]:
    """Degrees that both can say, with nothing or everything recomputed."""
    for degrees in degree_layouts(problem):
        given = by_count(problem, degrees)
        blocks = problem.model.layers
        if blocks % given.pp == 0 and refuse(problem.job, given) is None:
            yield from (given.recomputing(word) for word in ("none", "full"))


def rates(judge: Calculon) -> None:
    """Seconds for 1,000 layouts of each, and how alike they rank those that both can say."""
    problem = problem_of(model="gpt-6.6b", on="64xa100-80gb", global_batch=512, precision="bf16")
    found = list(layouts(problem))[:LAYOUTS]
    job = problem.job
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
    per = 1000.0 / len(found)
    print(f"{job.graph.name} on {job.cluster.name}: {len(found)} layouts, {len(steps)} that both can say")
    print(f"  simulated by weft: {per * weft_s:.1f} s per 1,000")
    print(f"  calculon, one process for all: {per * calculon_s:.1f} s per 1,000")
    print(
        f"  weft's search, which simulates few: {1000.0 * search_s / searched:.1f} s per 1,000 of {searched}"
    )
    ranks = spearman(*np.array(steps, dtype=np.float64).T)
    print(f"  rank correlation {ranks:.2f}" if ranks is not None else "  no order")


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


def search(planner: Metis) -> None:
    """Metis' plans in weft's simulator beside weft's own."""
    for model, on, batch, sequence in MIXED:
        problem = problem_of(model=model, on=on, global_batch=batch, sequence=sequence, precision="fp16")
        began = time.perf_counter()
        own = PLANNERS["weft"].search(problem).fitting[0]
        own_s = time.perf_counter() - began
        began = time.perf_counter()
        ranking = planner.search(problem)
        metis_s = time.perf_counter() - began
        steps = [
            (one.estimate_s, one.prediction.step_s, one.verdict is Verdict.FITS)
            for one in ranking.candidates
            if one.prediction is not None
        ]
        assert own.plan is not None
        assert own.prediction is not None
        best_s = own.prediction.step_s
        fitting = [step_s for _, step_s, fits in steps if fits]
        print(f"{model} on {on}, {batch} samples of {sequence} tokens")
        print(f"  weft   {best_s * 1e3:8.1f} ms, searched {own_s:5.1f} s: {own.layout}")
        first = ranking.fitting[0].layout
        print(f"  metis  {fitting[0] * 1e3:8.1f} ms, searched {metis_s:5.1f} s: {first}")
        print(
            f"  regret of its first plan {fitting[0] / best_s - 1.0:+.1%}, of the best of its first "
            f"{len(fitting)} {min(fitting) / best_s - 1.0:+.1%}"
        )
        print(
            f"  regret of its first plan by the full cost of each {full_cost_s(ranking) / best_s - 1.0:+.1%}"
        )
        form = PLANNERS["metis-form"].search(problem).fitting[0]
        assert form.plan is not None
        assert form.prediction is not None
        print(f"  regret of metis-form {form.prediction.step_s / best_s - 1.0:+.1%}: {form.layout}")
        said = [one for one in ranking.candidates if one.estimate_s is not None]
        ranks = spearman(*np.array([one[:2] for one in steps], dtype=np.float64).T)
        words = "none" if ranks is None else f"{ranks:.2f}"
        print(
            f"  weft can say {len(said)} of its first {len(ranking.candidates)} plans; "
            f"rank correlation over the {len(steps)} simulated: {words}"
        )


def main() -> None:
    print_machine()
    calculon = program("calculon", "https://github.com/calculon-ai/calculon")
    if calculon is not None:
        judge = Calculon(program=calculon)
        published(judge)
        rates(judge)
    metis = program("metis", "https://github.com/SamsungLabs/Metis")
    if metis is not None:
        search(replace(Metis(program=metis), finalists=24))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]) if sys.argv[1:] else main())
