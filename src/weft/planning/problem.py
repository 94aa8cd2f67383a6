"""`Problem`: everything that a planner needs, a request and the measurements of its devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Unpack

from weft.describe.assumption import assumed_of
from weft.describe.plan import LayerChoice, Plan
from weft.describe.plan_subject import PlanSubject, subject_of
from weft.describe.request import Request, RequestOptions, request_of_names, request_of_subject
from weft.describe.run_file import RunFile
from weft.errors import InputError
from weft.files import weft_home
from weft.moves.registry import refused_pins
from weft.planning.assumed_links import assumed_links
from weft.planning.long_steps import LongStep, predict_long
from weft.predict.corrections import Correction
from weft.predict.cost.host_link import assumed_through_host, goes_through_host
from weft.predict.cost.placed_plan import CostModel
from weft.predict.measurements import UNMEASURED, Measurements, load_measurements


@dataclass(frozen=True, kw_only=True, repr=False)
class Problem(Request):
    """A request, and the measurements that its plans are priced with."""

    measurements: Measurements = UNMEASURED

    @property
    def tokens_per_sample(self) -> int:
        """The tokens of a sample that speeds and costs count: 1 of a sample without tokens."""
        return self.job.sequence if self.model.reads_tokens else 1

    def choosing(self, choices: tuple[LayerChoice, ...]) -> Problem:
        """Return the problem with these choices for single layers, and no others.

        Raises:
            InputError: with every fault of the choices.
        """
        job = self.job.choosing(choices)
        return self if job is self.job else replace(self, job=job)

    def subject(self, run: RunFile) -> PlanSubject:
        """Return what a plan of this problem is for; `run` is the run file that poses it."""
        return PlanSubject(run=run, model=self.model, cluster=self.job.cluster)

    def corrected(self, correction: Correction | None) -> Problem:
        """Return the problem with this correction from measured steps, or with none."""
        return replace(self, measurements=replace(self.measurements, correction=correction))

    @cached_property
    def cost_model(self) -> CostModel:
        """The prices for the plans of every search."""
        measured = self.measurements
        return CostModel(
            graph=self.job.graph,
            cluster=self.job.cluster,
            machine=measured.machine,
            profile=measured.profile,
            correction=measured.correction,
            through_host=goes_through_host(self.job),
        )

    def step_of(self, plan: Plan) -> LongStep:
        """Predict a step of a plan; planners that find the same plan predict it once.

        The parts of held bytes are left out: a search keeps the steps of thousands of plans.

        Raises:
            InputError: see `predict_long`.
        """
        key = plan.model_dump_json()
        if key not in self._steps:
            self._steps[key] = replace(predict_long(self.cost_model, plan), held={})
        return self._steps[key]

    @cached_property
    def _steps(self) -> dict[str, LongStep]:
        return {}


def measured_problem(request: Request, *, home: Path | None = None) -> Problem:
    """Return the problem that a request poses, with the measurements in `home` (default: `weft_home()`).

    Raises:
        InputError: when a file of measurements is broken, or is of something else.
    """
    measured = load_measurements(request.job, home or weft_home())
    links = {one.key: one.words for one in assumed_links(request.job.cluster, measured)}
    if through_host := assumed_through_host(request.job):
        links["transport"] = through_host
    assumed = {**links, **assumed_of(request.job), **request.assumed}
    return Problem(**{**vars(request), "assumed": assumed}, measurements=measured)


def problem_of(
    *, model: str, on: str, home: Path | None = None, **options: Unpack[RequestOptions]
) -> Problem:
    """Resolve names to a problem.

    Raises:
        InputError: for an unknown model, cluster, device or precision.
    """
    return measured_problem(request_of_names(model=model, on=on, **options), home=home)


def problem_of_run(run: RunFile, *, home: Path | None = None) -> Problem:
    """Resolve the names of a run file and return the problem that it poses; see `problem_of_subject`."""
    return problem_of_subject(subject_of(run), home=home)


def problem_of_subject(subject: PlanSubject, *, home: Path | None = None) -> Problem:
    """Return the problem that a run file poses for its model and cluster.

    Raises:
        InputError: see `request_of_subject`; also when a pin keeps less than the goal's contract.
    """
    if refused := refused_pins(subject.run):
        raise InputError(refused)
    return measured_problem(request_of_subject(subject), home=home)
