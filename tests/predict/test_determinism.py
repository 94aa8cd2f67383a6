"""The same question has the same answer in every process, whatever its hashes are seeded with."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import hashlib
from weft.planning.compile import compile_plan
from weft.planning.planners import get_planner
from weft.planning.problem import problem_of
from weft.predict.predict import predict

problem = problem_of(model="gpt-1m", on="2xa100-80gb+2xt4", global_batch=8, precision="fp16")
job = problem.job
ranking = get_planner("weft").search(problem)
for candidate in ranking.candidates:
    print(candidate.layout, candidate.verdict, candidate.bound_s, candidate.peak_bytes, candidate.reason)
for candidate in ranking.fitting[:3]:
    plan = candidate.plan
    program = compile_plan(plan, job.graph)
    timeline = predict(plan, program, job.graph, job.cluster).simulation.timeline
    columns = (timeline.id, timeline.position, timeline.start_ns, timeline.end_ns)
    print(plan.plan_id, hashlib.sha256(b"".join(one.tobytes() for one in columns)).hexdigest())
"""


def test_processes_with_other_hashes_plan_and_simulate_alike() -> None:
    """Every verdict and reason, the plans' ids, and the order and times of all events."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    (one, error), (other, _) = (process.communicate(timeout=120) for process in running)
    assert one.count("\n") > 20, error
    assert one == other
