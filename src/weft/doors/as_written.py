"""The prediction of a plan in the words of another stack: the emitted file counts like any other."""

from __future__ import annotations

from dataclasses import replace

from weft.doors.emit import OWN_RUNS
from weft.doors.emit.base import Decided, Emitted
from weft.doors.explain import read_configuration
from weft.doors.implied import PredictedPlan, carried_out, planned_layout
from weft.errors import InputError
from weft.planning.planned import PlannedJob


def as_written(planned: PlannedJob, name: str, emitted: Emitted) -> PredictedPlan | None:
    """Return the plan that an emitted file amounts to, with its prediction. Return None where nothing is
    lost, weft's own runtime executes the plan itself, or the remaining plan cannot run.

    Choices that the file leaves to the program (recomputation, the samples of a micro-batch) are as planned.
    """
    if name in OWN_RUNS or not emitted.losses:
        return None
    decided = Decided(planned)
    configuration = read_configuration(emitted.text, emitted.file)
    if configuration.layout.recompute is None:
        configuration = configuration.saying({"recompute": decided.layout.recompute})
    replicas = configuration.replicas or decided.layout.dp
    problem = planned.problem
    job = replace(
        problem.job,
        global_batch=decided.global_batch,
        precision=planned.plan.precision,
        reduce_precision=configuration.reduce_precision,
    )
    problem = replace(problem, job=job)
    layout = carried_out(configuration, problem, replicas, decided.layout.micro_batch_size)
    try:
        return planned_layout(problem, layout)
    except InputError:
        return None
