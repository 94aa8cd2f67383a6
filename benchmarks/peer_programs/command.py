"""Planners compared on one problem, with the peers' own programs beside them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from weft.cli.output import Json, console, print_json
from weft.cli.plans import LayoutOptions, decided
from weft.cli.rankings import compared, comparison_record, named_planners, print_comparison
from weft.describe.run_file import asked_run
from weft.errors import InputError, RunError
from weft.planning.problem import problem_of_run

from .calculon import Calculon
from .judgement import Judgement, judge
from .metis import Metis
from .order import Order, order_of
from .program import LIMIT_S, PeerProgram

NAME = "benchmarks/peers.py"
app = App(name=NAME, version_flags=(), result_action="return_value")


def run(arguments: list[str]) -> int:
    """Answer one question; 2 for a mistake and 1 for a program that fails, with a line that says why."""
    try:
        app(arguments)
    except InputError as error:
        print(*(f"{NAME}: {violation}" for violation in error.violations), sep="\n", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    return 0


@app.default
def compare(
    source: str,
    /,
    *,
    on: str | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    pins: Annotated[LayoutOptions | None, Parameter(name="*")] = None,  # type: ignore[valid-type]
    compare: str = "weft",
    calculon: Path | None = None,
    metis: Path | None = None,
    python: str | None = None,
    seconds: float = LIMIT_S,
    out: Path | None = None,
    json: Json = False,
) -> None:
    """Show the best plan of each planner, and what programs of others say.

    Parameters
    ----------
    source
        A RUN.toml, a preset, or a folder with a config.json.
    on
        The cluster.
    global_batch
        Samples per step.
    sequence
        Tokens per sample.
    precision
        fp32, bf16 or fp16.
    compare
        Planners of weft, with commas between them.
    calculon
        A clone of Calculon's repository: its step and peak of every plan that was simulated.
    metis
        A clone of Metis' repository: its plans beside those of weft's planners.
    python
        The Python that runs them; else that of the clone's .venv, else the one that runs this.
    seconds
        How long each of them may take.
    out
        Write the best plan to this file.
    """

    def clone(name: str, root: Path) -> PeerProgram:
        return PeerProgram(name=name, root=root, python=python, limit_s=seconds)

    judging = None if calculon is None else Calculon(program=clone("calculon", calculon))
    planning = None if metis is None else Metis(program=clone("metis", metis))
    run = asked_run(
        source,
        on=on,
        global_batch=global_batch,
        sequence=sequence,
        precision=precision,
        pins=decided(pins),
    )
    problem = problem_of_run(run)
    planners = named_planners(compare)
    answers = compared(run, problem, [*planners, planning] if planning else planners, out)
    told: list[Judgement | Order] = [judge(judging, problem, answers)] if judging else []
    told += [order_of(one) for one in answers if planning and one.planner == planning.name and one.candidates]
    if json:
        record = comparison_record(problem, answers)
        print_json(record | ({"peers": [one.as_record() for one in told]} if told else {}))
        return
    print_comparison(problem, answers)
    for one in told:
        console().print("", one.table())
    if out is not None:
        print(f"wrote {out}")
