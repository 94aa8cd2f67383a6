"""How long a user waits: importing weft, the first answer of the planner, and what a rank compiles to start.

    python benchmarks/start_up.py                     # everything
    python benchmarks/start_up.py --only ranks        # what a rank compiles, and the whole program beside it

What a rank compiles is measured in fresh processes, in seconds of the processor, which other work on the
machine does not stretch, and in bytes that the process had in memory at its peak, Python and imports among
them. What is compiled first loads the methods, too; what is compiled once more does not. Pipelines run as
many micro-batches whatever the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import Value
from harness import Report, parser, peak_bytes, timed

RANKS = (8, 64, 512, 4096)
REPEATS = 5
MICRO_BATCHES = 32
MOST_PIPELINE = 8
TENSOR = 8
MODEL = "llama-7b"
# Of the largest to the smallest figure from the fewest to the most ranks.
FLAT = 2.0


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("--only", choices=("commands", "ranks"))
    made.add_argument("--compile", nargs=3, metavar=("FOLDER", "RANKS", "WHAT"), help=argparse.SUPPRESS)
    return made


def main() -> None:
    asked = options().parse_args()
    if asked.compile:
        folder, ranks, what = asked.compile
        print(json.dumps(compiled(Path(folder), int(ranks), what)))
        return
    report = Report("start_up", asked)
    report.print_machine()
    if asked.only != "ranks":
        commands(report)
    if asked.only != "commands":
        of_ranks(report)


def python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def commands(report: Report) -> None:
    if report.missing(name := "import weft, without starting Python"):
        empty_s = timed(lambda: python("-c", "pass")).value
        whole = timed(lambda: python("-c", "import weft"), target_s=0.3)
        report.add(name, whole.changed(lambda seconds: seconds - empty_s))
    plan = ("-m", "weft", "plan", "llama-13b", "--on", "64xa100-80gb")
    fresh = "a fresh process"
    report.time(f"weft plan llama-13b --on 64xa100-80gb, {fresh}", lambda: python(*plan), 3, target_s=5.0)
    report.time(
        f"weft schedule breadth-first, {fresh}", lambda: python(*plan[:2], "schedule", "breadth-first"), 3
    )


def of_ranks(report: Report) -> None:
    """What one rank compiles, and the whole program, for one model on ever more ranks."""
    report.say(f"{MODEL}, zero-1, 1f1b, {MICRO_BATCHES} micro-batches per pipeline; the last rank; medians")
    with tempfile.TemporaryDirectory(prefix="weft-start-") as folder:
        for ranks in RANKS:
            if report.missing(shape_of(ranks)):
                one_size(report, folder, ranks)
    for what in ("compiles its part", "once more", "peak"):
        found = [report.value(f"{shape_of(ranks)}: {what}") for ranks in RANKS]
        growth = Value(max(found) / min(found), "ratio", target=FLAT)
        report.add(f"from {RANKS[0]} to {RANKS[-1]} ranks, {what}", growth)


def one_size(report: Report, folder: str, ranks: int) -> None:
    asked = (folder, str(ranks))
    measured(*asked, "plan", 1)
    part, whole = measured(*asked, "part", REPEATS), measured(*asked, "whole", 1)
    report.add_cell(
        shape_of(ranks),
        {
            "reads the plan": Value(part["read_s"], "s"),
            "compiles its part": Value(part["compile_s"], "s"),
            "once more": Value(part["again_s"], "s"),
            "peak": Value(part["peak_bytes"], "bytes"),
            "compiles the whole": Value(whole["compile_s"], "s"),
            "verifies it": Value(whole["verify_s"], "s"),
            "peak of the whole": Value(whole["peak_bytes"], "bytes"),
        },
    )


def degrees_of(ranks: int) -> tuple[int, int, int]:
    """As many pipeline devices as leave two replicas, which share something out: (pp, dp, tp)."""
    tensor = TENSOR if ranks >= 64 else 1
    pipeline = min(MOST_PIPELINE, ranks // tensor // 2)
    return pipeline, ranks // tensor // pipeline, tensor


def shape_of(ranks: int) -> str:
    return "{} ranks, pp {} x dp {} x tp {}".format(ranks, *degrees_of(ranks))


def measured(folder: str, ranks: str, what: str, repeats: int) -> dict[str, float]:
    """Medians of what so many fresh processes say."""
    command = [sys.executable, __file__, "--compile", folder, ranks, what]
    found = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(repeats)
    ]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def compiled(folder: Path, ranks: int, what: str) -> dict[str, float]:
    """In a process of its own: write the plan, or read it and compile one rank's part or the whole."""
    path = folder / f"{ranks}.json"
    if what == "plan":
        write_plan(path, ranks)
        return {}
    from weft.describe.families import layer_graph
    from weft.describe.models import resolve_model
    from weft.describe.plan_file import load_plan
    from weft.planning.compile import compile_part, compile_plan
    from weft.program.verify import require_valid

    graph = layer_graph(resolve_model(MODEL))
    start_s = time.process_time()
    plan = load_plan(path)
    read_s = time.process_time()
    if what == "part":
        compile_part(plan, graph, ranks - 1)
        first_s = time.process_time()
        compile_part(plan, graph, ranks - 1)
        return {
            "read_s": read_s - start_s,
            "compile_s": first_s - read_s,
            "again_s": time.process_time() - first_s,
            "peak_bytes": peak_bytes(),
        }
    program = compile_plan(plan, graph)
    compiled_s = time.process_time()
    require_valid(program)
    return {
        "compile_s": compiled_s - read_s,
        "verify_s": time.process_time() - compiled_s,
        "peak_bytes": peak_bytes(),
    }


def write_plan(path: Path, ranks: int) -> None:
    from weft.describe.layout import Layout
    from weft.describe.plan_file import PlanFile
    from weft.moves.layout import build_plan, flops_per_layer
    from weft.planning.problem import problem_of

    pipeline, replicas, tensor = degrees_of(ranks)
    batch = MICRO_BATCHES * replicas
    job = problem_of(model=MODEL, on=f"{ranks}xa100-80gb", global_batch=batch, precision="bf16").job
    layout = Layout(
        pp=pipeline,
        dp=replicas,
        tp=tensor,
        loops=1,
        micro_batch_size=1,
        schedule="1f1b",
        sharding="zero-1",
    )
    path.write_text(PlanFile(build_plan(job, layout, flops_per_layer(job))).to_json())


if __name__ == "__main__":
    main()
