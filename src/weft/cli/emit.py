"""`weft plan --emit`: the best plan as a file of another stack, and the prediction of that file."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from weft.cli.output import print_json, write_asked
from weft.describe.request import with_gradient_norm
from weft.describe.units import format_bytes, format_seconds
from weft.doors.emit import NO_LAYOUTS, OWN_RUNS, emit
from weft.doors.emit.base import Decided, Emitted
from weft.doors.explain import read_configuration
from weft.doors.implied import PredictedPlan, carried_out, planned_layout
from weft.errors import InputError
from weft.planning.planned_job import PlannedJob
from weft.run.supported import planned_only, unsupported


def write_emitted(planned: PlannedJob, name: str, out: Path | None, *, json: bool) -> None:
    """Write the file to `out` or standard output, and the losses and start command to standard error.

    Raises:
        InputError: if the stack is unknown or cannot express the plan, or if it starts weft's own runtime
            and that cannot execute the plan.
    """
    emitted = emit(planned, name)
    problems = planned_only(planned.problem.model) + unsupported(planned.plan)
    if name in OWN_RUNS and problems:
        raise InputError(problems)
    lines = [str(loss) for loss in emitted.losses]
    nearest = as_written(planned, name, emitted)
    if nearest is not None:
        lines.append(_compared(planned, nearest))
    for line in lines:
        print(f"weft: {line}", file=sys.stderr)
    launch = emitted.launch if out is None else emitted.launch_from(out)
    text = emitted.text.replace(emitted.launch, launch)
    write_asked([(out, lambda: text)])
    if json:
        record = {
            "stack": name,
            "file": str(out or emitted.file),
            "text": text,
            "launch": launch,
            "plan_step_s": planned.prediction.step_s,
            "written_step_s": nearest.prediction.step_s if nearest is not None else None,
        }
        print_json(
            record | {"losses": [{"what": one.what, "nearest": one.nearest} for one in emitted.losses]}
        )
        return
    print(f"start: {launch}", file=sys.stderr)
    if out is None:
        print(text, end="")
    else:
        print(f"wrote {out}")


def _compared(planned: PlannedJob, nearest: PredictedPlan) -> str:
    """Return one line: the steps of the written file and the plan, and the missing memory of the file."""
    written_s, planned_s = nearest.prediction.step_s, planned.prediction.step_s
    line = f"as written, a step is predicted to take {format_seconds(written_s)}"
    over = nearest.overfull_bytes(planned.problem.job.cluster)
    if over > 0:
        line += f" and {format_bytes(over)} more than the fullest device has"
    return f"{line}; the plan's takes {format_seconds(planned_s)}"


def as_written(planned: PlannedJob, name: str, emitted: Emitted) -> PredictedPlan | None:
    """Return the plan that an emitted file amounts to, with its prediction. Return None where nothing is
    lost, weft's own runtime executes the plan itself, or the remaining plan cannot run.

    Choices that the file leaves to the program (recomputation, the samples of a micro-batch) are as planned.
    """
    if name in NO_LAYOUTS or not emitted.losses:
        return None
    decided = Decided(planned)
    configuration = read_configuration(emitted.text, emitted.file)
    if configuration.layout.recompute is None:
        configuration = configuration.saying({"recompute": decided.layout.recompute})
    replicas = configuration.replicas or decided.layout.dp
    problem = planned.problem
    methods = problem.job.methods
    if configuration.clips:
        methods = with_gradient_norm(methods)
    job = replace(
        problem.job,
        methods=methods,
        global_batch=decided.global_batch,
        precision=configuration.precision or planned.plan.precision,
        reduce_precision=configuration.reduce_precision,
        launch=configuration.launch,
    )
    problem = replace(problem, job=job)
    layout = carried_out(configuration, problem, replicas, decided.layout.micro_batch_size)
    try:
        return planned_layout(problem, layout, configuration.memory)
    except InputError:
        return None
