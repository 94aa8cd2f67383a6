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
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import median_s, print_machine, report

RANKS = (8, 64, 512, 4096)
REPEATS = 5
MICRO_BATCHES = 32
MOST_PIPELINE = 8
TENSOR = 8
MODEL = "llama-7b"
# Of the largest to the smallest figure from the fewest to the most ranks.
FLAT = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("commands", "ranks"))
    parser.add_argument("--compile", nargs=3, metavar=("FOLDER", "RANKS", "WHAT"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.compile:
        folder, ranks, what = asked.compile
        print(json.dumps(compiled(Path(folder), int(ranks), what)))
        return
    print_machine()
    if asked.only != "ranks":
        commands()
    if asked.only != "commands":
        of_ranks()


def python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def commands() -> None:
    empty = median_s(lambda: python("-c", "pass"))
    report(
        "import weft (without starting Python)", median_s(lambda: python("-c", "import weft")) - empty, 0.3
    )
    plan = ("-m", "weft.cli.main", "plan", "llama-13b", "--on", "64xa100-80gb")
    report("weft plan llama-13b --on 64xa100-80gb", median_s(lambda: python(*plan), 3), 5.0)
    report("weft schedule breadth-first", median_s(lambda: python(*plan[:2], "schedule", "breadth-first"), 3))


def of_ranks() -> None:
    """What one rank compiles, and the whole program, for one model on ever more ranks."""
    print(f"{MODEL}, zero-1, 1f1b, {MICRO_BATCHES} micro-batches per pipeline; the last rank; medians")
    columns = ("ranks", "plan", "reads it", "part", "again", "peak", "whole", "verifies", "peak")
    print("{:>6} {:<22} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}".format(*columns))
    figures: dict[str, list[float]] = {name: [] for name in ("compile_s", "peak_bytes", "again_s")}
    with tempfile.TemporaryDirectory(prefix="weft-start-") as folder:
        for ranks in RANKS:
            asked = (folder, str(ranks))
            words = measured(*asked, "plan", 1)["words"]
            part, whole = measured(*asked, "part", REPEATS), measured(*asked, "whole", 1)
            print(
                f"{ranks:>6} {words:<22} {part['read_s'] * 1e3:>7.1f} ms {part['compile_s'] * 1e3:>7.1f} ms"
                f" {part['again_s'] * 1e3:>7.1f} ms {part['peak_bytes'] / 1e6:>7.1f} MB"
                f" {whole['compile_s'] * 1e3:>7.1f} ms {whole['verify_s'] * 1e3:>7.0f} ms"
                f" {whole['peak_bytes'] / 1e6:>7.1f} MB"
            )
            for name, found in figures.items():
                found.append(part[name])
    words = {"compile_s": "seconds of a part", "peak_bytes": "peak memory", "again_s": "seconds, once more"}
    span = f"{RANKS[0]} to {RANKS[-1]} ranks"
    for name, found in figures.items():
        ratio = max(found) / min(found)
        verdict = "met" if ratio <= FLAT else "MISSED"
        print(f"{words[name]}, {span}: within {ratio:.2f}x (target {FLAT:g}x: {verdict})")


def measured(folder: str, ranks: str, what: str, repeats: int) -> dict[str, object]:
    """Medians of what so many fresh processes say."""
    command = [sys.executable, __file__, "--compile", folder, ranks, what]
    found = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(repeats)
    ]
    if what == "plan":
        return found[0]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def compiled(folder: Path, ranks: int, what: str) -> dict[str, object]:
    """In a process of its own: write the plan, or read it and compile one rank's part or the whole."""
    path = folder / f"{ranks}.json"
    if what == "plan":
        return {"words": write_plan(path, ranks)}
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


def write_plan(path: Path, ranks: int) -> str:
    """As many pipeline devices as leave two replicas, which share something out."""
    from weft.describe.layout import Layout
    from weft.describe.plan_file import PlanFile
    from weft.moves.layout import build_plan, flops_per_layer
    from weft.planning.problem import problem_of

    tensor = TENSOR if ranks >= 64 else 1
    pipeline = min(MOST_PIPELINE, ranks // tensor // 2)
    replicas = ranks // tensor // pipeline
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
    return f"pp {pipeline} x dp {replicas} x tp {tensor}"


def peak_bytes() -> int:
    """Most memory that this process has had; `getrusage` would tell that of its parent, too."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says it"
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
