"""Emitted files given to the stacks they are for: which plans each takes, and what it says of the others.

    python benchmarks/doors_in_stacks.py --python megatron=ENVIRONMENT/bin/python --python k8s=...
    python benchmarks/doors_in_stacks.py ENVIRONMENTS

The second form looks for `ENVIRONMENTS/STACK/bin/python`. A stack that is in neither is skipped. Each is
installed in an environment of its own, which needs no weft:

    python -m venv ENVIRONMENTS/STACK
    ENVIRONMENTS/STACK/bin/pip install -c constraints.txt PACKAGES

    megatron          torch megatron-core triton, 0.17 or later, whose wheels are for Python 3.12 and later
    torchtitan        torch torchtitan triton
    torchtitan-toml   torch "torchtitan<0.3" tyro triton
    deepspeed         torch deepspeed
    accelerate        torch accelerate deepspeed transformers
    skypilot          skypilot; it fetches its catalogue of accelerators from the internet
    k8s               kubernetes-validate
    slurm             nothing; the system has slurmctld and sbatch (Debian: slurm-wlm), and this runs as root

No device is needed: nothing is trained but what `in_STACK.py` says.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from figures import Value
from harness import Report, parser
from stacks.emitted_plans import Case, emitted_for
from stacks.table import Asked, answers_of, rows

from weft.doors.emit import EMITTERS
from weft.doors.emit.base import Decided, Emitted

HERE = Path(__file__).parent / "stacks"
TIME_LIMIT_S = 900


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("environments", nargs="?", type=Path, help="a folder with an environment per stack")
    made.add_argument("--python", action="append", default=[], metavar="STACK=PATH")
    return made


def main() -> int:
    made = options()
    asked = made.parse_args()
    pythons = dict(one.split("=", 1) for one in asked.python)
    if unknown := set(pythons) - set(EMITTERS):
        made.error(f"no such stack: {', '.join(sorted(unknown))}; there are {', '.join(EMITTERS)}")
    report = Report("doors_in_stacks", asked)
    report.print_machine()
    for stack in EMITTERS:
        python = pythons.get(stack) or (sys.executable if stack == "slurm" else None)
        if python is None and asked.environments is not None:
            python = str(asked.environments / stack / "bin" / "python")
        if report.missing(stack):
            add_answers(report, ask(stack, python))
    return 1 if any(report.values(stack).get("failed") for stack in EMITTERS) else 0


def add_answers(report: Report, found: Asked) -> None:
    """What a stack said; nothing is added of one that was not asked."""
    report.say("\n".join(rows(found)))
    if not found.skipped:
        report.add_outcome(
            found.stack,
            len(found.accepted) + len(found.refused),
            len(found.refused_unsaid),
            accepted=Value(len(found.accepted), "count"),
            refused=Value(len(found.refused), "count"),
        )


def ask(stack: str, python: str | None) -> Asked:
    """What a stack says of every plan."""
    if stack == "slurm" and shutil.which("slurmctld") is None:
        return Asked(stack=stack, skipped="this system has no slurmctld")
    if python is None or not Path(python).exists():
        return Asked(stack=stack, skipped=f"no environment: {python or f'give --python {stack}=PATH'}")
    written, refused = emitted_for(stack)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = [_case(folder, number, *entry) for number, entry in enumerate(written.items())]
        (folder / "cases.json").write_text(json.dumps(cases))
        program = HERE / f"in_{stack.replace('-', '_')}.py"
        run = subprocess.run(
            [python, str(program), name], capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
    losses = {name: tuple(map(str, emitted.losses)) for name, (_, emitted) in written.items()}
    return answers_of(stack, run.stdout, run.stderr, losses=losses, not_written=refused)


def _case(folder: Path, number: int, name: str, entry: tuple[Case, Emitted]) -> Mapping[str, Any]:
    """Write a file into a folder of its own, and say of the plan what programs compare it with."""
    case, emitted = entry
    decided = Decided(case.planned())
    (folder / str(number)).mkdir()
    (folder / str(number) / emitted.file).write_text(emitted.text)
    return {
        "name": name,
        "file": f"{number}/{emitted.file}",
        "written": emitted.file,
        "launch": emitted.launch,
        "ranks": decided.layout.ranks,
        "replicas": decided.layout.dp,
        "parameters": decided.job.problem.job.graph.parameters(),
    }


if __name__ == "__main__":
    sys.exit(main())
