"""The rules of bubble filling: there are bubbles, work for them, and steps for whole windows."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from weft.bundles import parts
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.describe.plan_file import PlanRule, listed
from weft.describe.run_tables.methods import checked_options
from weft.errors import InputError, Violation
from weft.methods.bubble_filling.drift import read_factors
from weft.methods.bubble_filling.kinds import owed_by
from weft.methods.bubble_filling.options import NAME, OPEN, TABLE_NAME, BubbleOptions, options_of
from weft.methods.bubble_filling.step_works import StepWork
from weft.methods.bubble_filling.table import unknown_work
from weft.methods.bubble_filling.works import BubbleWork
from weft.moves.composition import Composition
from weft.planning.job_rules import JobRule
from weft.planning.planned_job import PlannedJob

_METHOD = "work in bubbles"


def _work_problem(work: str, methods: Collection[str]) -> Violation | None:
    """Return why a list of works does not go with the methods of a job or a plan."""
    with_tables = sorted(one.method for one in parts(BubbleWork))
    asked = work.split(",")
    for name in asked:
        if (unknown := unknown_work(name)) is not None:
            return unknown
        if name in with_tables and name not in methods:
            return Violation(f"{TABLE_NAME}.work", f"{name!r} is not asked for", f"a table [{name}]")
    left = [name for name in with_tables if name in methods and name not in asked]
    if left:
        return Violation(f"{TABLE_NAME}.work", f"lacks {listed(left)}, which the job has", ", ".join(left))
    return None


def _work(job: Job, layout: Layout) -> str | None:
    methods = layout.methods_beside(job.methods)
    choice = next((one for one in methods if one.name == NAME), None)
    if choice is None:
        return None
    asked = checked_options(BubbleOptions, choice, TABLE_NAME)
    found = _work_problem(asked.work, [one.name for one in methods])
    return None if found is None else str(found)


def _no_bubbles(job: Job, layout: Layout) -> str | None:
    methods = layout.methods_beside(job.methods)
    if layout.pp > 1 or not any(one.name == NAME for one in methods):
        return None
    return f"{TABLE_NAME}: one device of a pipeline waits for no other, and has no bubbles; nearest pp: 2"


def _two_pipelines(job: Job, layout: Layout) -> str | None:
    choice = next((one for one in layout.methods_beside(job.methods) if one.name == NAME), None)
    if choice is None or layout.schedule != "chimera":
        return None
    asked = str(choice.options.get("work", "")).split(",")
    found = sorted(one.method for one in parts(StepWork) if one.method in asked)
    if not found:
        return None
    problem = f"chimera: two pipelines share the bubbles of {listed(found)}"
    return f"{TABLE_NAME}: schedule: {problem}; nearest schedule: 1f1b"


def _problems_of(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Yield what a plan that was edited by hand must not contain."""
    try:
        options = options_of(plan)
    except InputError as error:
        yield from error.violations
        return
    if options is None:
        return
    found = _work_problem(options.work, [one.name for one in plan.methods])
    if found is not None:
        yield Violation(f"plan: {found.where}", found.problem, found.nearest)
    try:
        read_factors(options.measured)
    except InputError as error:
        yield from error.violations
    if options.windows == OPEN:
        problem = f"windows: {OPEN}: the choice of a plan decides them, and a plan states them"
        yield Violation(f"plan: methods: {NAME}", problem)


def _too_long(planned: PlannedJob) -> Iterator[Violation]:
    """Yield a violation if a run ends before the work of a window does."""
    owed, steps = owed_by(planned.program), planned.last_step
    if options_of(planned.plan) is None or owed is None or max(owed.steps) <= steps:
        return
    problem = f"{steps}; the work of one stage is done every {max(owed.steps)} steps"
    yield Violation("train.steps", problem, str(max(owed.steps)))


RULES = (
    Composition(method=_METHOD, other="work that nobody asks for", reason="bubbles hold work", refuse=_work),
    Composition(method=_METHOD, other="one device", reason="it has no bubbles", refuse=_no_bubbles),
    Composition(
        method=_METHOD,
        other="chimera, for work of every step",
        reason="two pipelines share its bubbles",
        refuse=_two_pipelines,
    ),
    PlanRule(refuse=_problems_of),
    JobRule(refuse=_too_long),
)
