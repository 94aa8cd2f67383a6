"""The command of the search: `plan`."""

from __future__ import annotations

from dataclasses import asdict, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from weft.cli.advice import SHOWN, show_plan
from weft.cli.curve import show_curve
from weft.cli.emit import write_emitted
from weft.cli.output import (
    Flag,
    Json,
    WrittenFile,
    WrittenPicture,
    print_warnings,
    progressing,
    refuse_options,
)
from weft.cli.rankings import budgeted, planned_visibly, show_comparison
from weft.cli.replanning import show_replanning
from weft.cli.synchronisations import show_synchronisations
from weft.describe.layout import PartialLayout
from weft.describe.plan_file import is_plan_file
from weft.describe.run_file import asked_run, changed
from weft.doors.emit import require_stack
from weft.errors import InputError, Violation
from weft.planning.fewer_nodes import better_without
from weft.planning.nothing_fits import NothingFitsError
from weft.planning.plan_file_job import plan_file_job
from weft.planning.problem import problem_of_run
from weft.planning.remedies import remedies
from weft.training.trials import require_this_machine

_SCHEMAS = {name: schema["anyOf"] for name, schema in PartialLayout.model_json_schema()["properties"].items()}
_KINDS = {name: {kind.get("type", "string") for kind in kinds} for name, kinds in _SCHEMAS.items()}
# Fields that are lists of integers.
_COUNTS = {
    name
    for name, kinds in _SCHEMAS.items()
    if any(kind.get("items", {}).get("type") == "integer" for kind in kinds)
}
# Options that few need: short help has their names alone.
SEARCH = Group("The search", sort_key=1)
OTHERS = Group("Other answers", sort_key=2)
PINS = Group("Pins of the layout", sort_key=3)


def _option(name: str) -> tuple[str, object, None]:
    kind = int if "integer" in _KINDS[name] else str
    words = PartialLayout.model_fields[name].description
    return name, Annotated[kind | None, Parameter(help=f"Pin {words}.", group=PINS)], None


LayoutOptions = make_dataclass(
    "LayoutOptions",
    map(_option, PartialLayout.model_fields),
    kw_only=True,
    # cyclopts treats a class of the standard library as a plain value.
    namespace={"__module__": __name__},
)


def decided(options: object | None) -> dict[str, Any]:
    """Return the keys of `[plan]` from `LayoutOptions`; words separated by commas become tuples."""
    if options is None:
        return {}
    given: dict[str, Any] = asdict(options)  # type: ignore[call-overload]  # its class is made at run time
    return {name: _value(name, value) for name, value in given.items()}


def _value(name: str, value: Any) -> Any:
    if not value or "array" not in _KINDS[name]:
        return value
    words = tuple(value.split(","))
    if name in _COUNTS:
        # Other words pass: the check of the run file refuses them with all its other errors.
        return tuple(int(word) if word.isdecimal() else word for word in words)
    return words if len(words) > 1 else value


def plan(
    source: str | None = None,
    /,
    *,
    from_: Annotated[Path | None, Parameter(name="--from", group=OTHERS)] = None,
    on: str | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    all_: Annotated[Flag, Parameter(name="--all")] = False,
    what_if: Annotated[list[str] | None, Parameter(allow_leading_hyphen=True)] = None,
    compare: str | None = None,
    out: WrittenFile | None = None,
    emit: str | None = None,
    report: WrittenFile | None = None,
    planner: Annotated[str | None, Parameter(group=SEARCH)] = None,
    without: Annotated[list[str] | None, Parameter(group=SEARCH)] = None,
    memory_risk: Annotated[float | None, Parameter(group=SEARCH)] = None,
    budget_seconds: Annotated[float | None, Parameter(group=SEARCH)] = None,
    top: Annotated[int | None, Parameter(group=OTHERS)] = None,
    measure: Annotated[int | None, Parameter(group=OTHERS)] = None,
    compare_sync: Annotated[Flag, Parameter(group=OTHERS)] = False,
    curve: Annotated[Flag, Parameter(group=OTHERS)] = False,
    critical_batch: Annotated[float | None, Parameter(group=OTHERS)] = None,
    svg: Annotated[WrittenPicture | None, Parameter(group=OTHERS)] = None,
    pins: Annotated[LayoutOptions | None, Parameter(name="*")] = None,  # type: ignore[valid-type]
    json: Json = False,
) -> None:
    """Rank the layouts of a model on a cluster, with reasons.

    - `weft plan run.toml`
    - `weft plan llama-13b --on 64xa100-80gb`
    - `weft plan gpt2 --on 8xa100-80gb+8xt4 --compare amp,megatron,metis-form`
    - `weft plan llama-13b --on 64xa100-80gb --emit megatron --out train.sh`
    - `weft plan --from plan.json --without "device 2" --out next.json`

    Parameters
    ----------
    source
        A RUN.toml, a preset, or a folder with a config.json. With --emit also a PLAN.json.
    from_
        In place of SOURCE: plan the job of this PLAN.json, or run, again without what --without names. Few
        bytes move. Shows for each plan after how many steps it has paid for the bytes that it moves. The one
        with the fewest goes to --out.
    on
        this-machine, a CLUSTER.toml, or words such as 64xa100-80gb; replaces the run file's cluster.
    without
        Nodes to leave out: a group or a device, or some of them, such as "2 t4". Or a single device by its
        rank, such as "device 2". May be given several times.
    global_batch
        Samples per optimizer step.
    sequence
        Tokens per sample.
    precision
        fp32, bf16, fp16 or fp64; any: bf16 (fp16 where devices lack it) or fp32, with the better plan.
    planner
        The planner of the search: weft (default), homogeneous, uniform, megatron, amp, graphpipe,
        pipedream, piper, equal-split, annealing, metis-form, random or exhaustive. By placing single
        layers: baechi, m-topo, m-etf, m-sct, heft, round-robin, expert, learned or repair.
    memory_risk
        The largest probability that a plan does not fit (0.02).
    budget_seconds
        Seconds after which the best plan so far is the answer (planner weft).
    compare
        Show the best plan of each planner: amp,megatron,metis-form. One simulator predicts all.
    compare_sync
        Show each method of [sync] within the goal's contract, on its best layout, with its bytes and codecs.
    top
        List so many of the best candidates, with the reason for each place.
    all_
        List the best candidates, and the memory of every rank. These are 12 candidates, or --top. With
        --curve, every layout.
    what_if
        Forecast the job on a changed cluster. Changes: "inter 25 Gbit/s", "intra 100 GB/s",
        "memory 40 GB", "device h100-80gb", "+1 node a100-80gb", "-1 node fast". May be given several times.
    out
        Write the best plan to this file.
    emit
        Write the best plan for another stack, such as slurm. The file goes to --out or here.
        Also the plan of a PLAN.json, without a search: `weft plan plan.json --emit megatron`.
        Stacks: megatron, torchtitan, torchtitan-toml (up to 0.2), deepspeed, accelerate, device-map. Also
        slurm, skypilot or k8s, which start weft's own runtime.
    report
        Write a page that shows every layout, step against memory; with --curve, both charts.
    measure
        Train this many of the best plans on this machine, ten steps each; the fastest is the best.
    curve
        Compare orders of micro-batches over samples per device, and time with cost on larger clusters.
    critical_batch
        With --curve: samples per step at which training needs twice the least samples.
    svg
        With --curve: write both charts to this file.
    """
    words = {**decided(pins), "planner": planner}
    never_without_a_search = {
        "--global-batch": global_batch,
        "--sequence": sequence,
        "--precision": precision,
        "--all": all_ or None,
        "--what-if": what_if,
        "--compare": compare,
        "--report": report,
        "--memory-risk": memory_risk,
        "--budget-seconds": budget_seconds,
        "--top": top,
        "--measure": measure,
        "--compare-sync": compare_sync or None,
        "--curve": curve or None,
        "--critical-batch": critical_batch,
        "--svg": svg,
        **{f"--{name.replace('_', '-')}": value for name, value in words.items()},
    }
    if from_ is not None:
        never_from = {"SOURCE": source, "--on": on, "--emit": emit, **never_without_a_search}
        other = "another job or cluster: weft plan RUN.toml --on CLUSTER"
        refuse_options(never_from, f"not with --from, which plans the job of that file again; {other}")
        show_replanning(from_, without, out=out, json=json)
        return
    if source is None:
        missing = "missing: a RUN.toml, a preset or a folder is planned, or the job of --from PLAN.json again"
        raise InputError(Violation("SOURCE", missing, "run.toml"))
    if is_plan_file(Path(source)):
        if emit is None:
            what = f"{source} is a plan; --emit writes it for another stack, and weft show tells it"
            raise InputError(Violation("SOURCE", what, f"weft show {source}"))
        never = {"--without": without, **never_without_a_search}
        refuse_options(never, f"not with the plan of {source}, which is written as it is")
        job = plan_file_job(Path(source), on=on)
        # A plan file states all keys, also those that nobody chose.
        write_emitted(replace(job, run=job.run.without_defaults()), emit, out, json=json)
        return
    only_curve = {"--critical-batch": critical_batch, "--svg": svg}
    if top is not None and top < 1:
        raise InputError(Violation("--top", f"{top}: a list has at least one candidate", str(SHOWN)))
    never_curve = {
        "--global-batch": global_batch,
        "--out": out,
        "--planner": planner,
        "--compare": compare,
        "--compare-sync": compare_sync or None,
        "--emit": emit,
        "--what-if": what_if,
        "--measure": measure,
        "--top": top,
    }
    if curve:
        refuse_options(never_curve, "not with --curve, which searches every batch")
    else:
        refuse_options(only_curve, "only with --curve")
    run = asked_run(
        source, on=on, global_batch=global_batch, sequence=sequence, precision=precision, pins=words
    )
    run = changed(run, {"goal": {"memory_risk": memory_risk}, "cluster": {"without": without}})
    print_warnings(run.warnings)
    if curve:
        problem = problem_of_run(run)
        show_curve(problem, critical_batch=critical_batch, every=all_, svg=svg, report=report, json=json)
        return
    if compare is not None:
        never = {
            "--planner": planner,
            "--what-if": what_if,
            "--report": report,
            "--measure": measure,
            "--compare-sync": compare_sync or None,
        }
        refuse_options(never, "not with --compare, which names several planners")
        show_comparison(run, compare, out=out, json=json)
        return
    budget = None if budget_seconds is None else budgeted(run, budget_seconds)
    if compare_sync:
        never = {"--emit": emit, "--what-if": what_if, "--report": report, "--measure": measure}
        refuse_options(never, "not with --compare-sync, which compares methods and chooses none")
        show_synchronisations(run, budget, out=out, json=json)
        return
    if measure is not None:
        require_this_machine(run, measure)
    if emit is not None:
        require_stack(emit, problem_of_run(run).model)
    try:
        planned = planned_visibly(run, budget)
    except NothingFitsError as error:
        with progressing("no layout fits; searching for what would") as progress:
            found = [Violation("would fit with", one.words) for one in remedies(run, error, report=progress)]
        raise InputError([*error.violations, *found]) from None
    if emit is not None:
        write_emitted(planned, emit, out, json=json)
        return
    with progressing("searching without some nodes") as progress:
        fewer = better_without(run, planned, budget, progress)
    show_plan(
        planned,
        source,
        fewer=fewer,
        listed=SHOWN if all_ and top is None else top,
        changes=what_if or (),
        measure=measure,
        out=out,
        report=report,
        json=json,
    )
