"""Plans of jobs: searched for, given, moved to another subject, or taking over from others."""

from __future__ import annotations

from dataclasses import replace

from weft.describe.job import Job
from weft.describe.layer_choices import job_problems
from weft.describe.loss_choice import other_choices
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanFile, check_plan
from weft.describe.plan_subject import PlanSubject
from weft.describe.prediction import Prediction
from weft.describe.run_file import RunFile
from weft.describe.run_tables.planning import PlanTable
from weft.describe.run_tables.training import ANY_PRECISION
from weft.describe.synchronisation import AUTO, DENSE, derived_options
from weft.describe.units import counted
from weft.errors import InputError, Violation
from weft.moves.registry import refused_pins
from weft.planning.compile import (
    compile_plan,
)
from weft.planning.goals import goal_value, goal_words, require_prices
from weft.planning.nothing_fits import nothing_fits
from weft.planning.planned_job import Later, PlannedJob
from weft.planning.planners import Candidate, Planner, Ranking, get_planner
from weft.planning.precisions import in_precision, searched_in_each
from weft.planning.problem import Problem, problem_of_run, problem_of_subject
from weft.planning.synchronisations import decided_sync, in_sync, merged, synchronised_in_each
from weft.planning.ties import break_ties
from weft.predict.cost.price import price
from weft.predict.predict import predict, predict_priced
from weft.predict.simulator import Simulation
from weft.program.passes import ordered_passes
from weft.program.program import Program

DEFAULT_PLANNER = "weft"


def plan_run(run: RunFile, *, problem: Problem | None = None, planner: Planner | None = None) -> PlannedJob:
    """Search the best plan for a run file, with its planner or the given one.

    Raises:
        NothingFitsError: when no layout fits.
        InputError: when the run file poses no legal problem, the best plan misses the deadline, or the later
            plan cannot take over.
    """
    if run.train.precision == ANY_PRECISION:
        return _in_the_best_precision(run, planner)
    if run.sync.method == AUTO:
        job = _in_the_best_sync(run, planner)
    else:
        job = _searched(run, problem or problem_of_run(run), planner)
    job = replace(job, later=_searched_later(job.run, job.problem, planner))
    if job.misplaced:
        raise InputError(job.misplaced)
    _require_deadline(job)
    return job


def _searched(run: RunFile, problem: Problem, planner: Planner | None) -> PlannedJob:
    """Return the best plan of a problem."""
    if problem.minimise == "cost":
        require_prices(problem.job.cluster)
    planner = planner or get_planner(run.plan.planner or DEFAULT_PLANNER)
    ranking = break_ties(planner.search(problem))
    if not ranking.fitting:
        raise nothing_fits(ranking)
    return _best_of(run, problem, ranking)


def _best_of(run: RunFile, problem: Problem, ranking: Ranking) -> PlannedJob:
    plan, prediction, _ = decided_file(run, problem, ranking.fitting[0])
    return PlannedJob(run=run, problem=problem, plan=plan, ranking=ranking, chosen_for=prediction)


def decided_file(run: RunFile, problem: Problem, candidate: Candidate) -> PlanFile:
    """Return the plan of a fitting candidate after all methods have decided, with prediction and subject.

    Raises:
        InputError: as `decided` does.
    """
    assert candidate.plan is not None, "a fitting candidate was simulated"
    plan, prediction = decided(problem, candidate.plan), candidate.prediction
    if plan != candidate.plan:
        prediction = predict(problem.cost_model, plan, compile_plan(plan, problem.job.graph)).prediction
    return PlanFile(plan, prediction, problem.subject(run))


def searched_densely(run: RunFile, planner: Planner | None = None) -> PlannedJob:
    """Return the best plan in which replicas add up whole gradients, whatever the run file says.

    Raises:
        InputError: as `plan_run` does.
    """
    dense = in_sync(run, Choice(name=DENSE))
    return _searched(dense, problem_of_run(dense), planner)


def _in_the_best_sync(run: RunFile, planner: Planner | None) -> PlannedJob:
    dense = searched_densely(run, planner)
    assert dense.ranking is not None, "it was searched for"
    found = synchronised_in_each(dense.ranking, run.train.steps)
    run, problem = in_sync(run, found[0].sync), decided_sync(dense.problem, found)
    return _best_of(run, problem, merged(dense.ranking, found))


def _searched_later(run: RunFile, problem: Problem, planner: Planner | None) -> Later | None:
    """Return the best plan that may take over, where the run file has one."""
    then = run.plan.then
    if then is None:
        return None
    pins = PlanTable(**then.given, planner=run.plan.planner)
    run = run.model_copy(update={"plan": pins})
    try:
        if refused := refused_pins(run):
            raise InputError(refused)
        job = _searched(run, replace(problem, pins=pins), planner)
    except InputError as error:
        raise InputError(
            [replace(one, where=f"plan.then: {one.where}") for one in error.violations]
        ) from None
    return Later(then.at_step, job)


def _in_the_best_precision(run: RunFile, planner: Planner | None) -> PlannedJob:
    found = searched_in_each(run, lambda decided: plan_run(decided, planner=planner))
    values = {name: goal_value(one.problem, one.prediction, one.plan.ranks) for name, one in found.items()}
    best = min(found, key=values.__getitem__)
    words = ", ".join(
        f"{name}: {goal_words(one.problem, one.prediction, one.plan.ranks)}" for name, one in found.items()
    )
    chosen = found[best]
    assumed = {**chosen.problem.assumed, "precision": f"{best}, the best of those searched ({words})"}
    return replace(chosen, problem=replace(chosen.problem, assumed=assumed))


def planned_for(subject: PlanSubject, plan: Plan, prediction: Prediction | None = None) -> PlannedJob:
    """Take a plan as it is, after checking it against its subject.

    Without a given prediction the plan is predicted at first use.

    Raises:
        InputError: with every fault of the plan.
    """
    run, problem = posed(subject, plan)
    return _checked(run, problem, plan, prediction)


def moved(subject: PlanSubject, plan: Plan) -> PlannedJob:
    """Take the decisions of a plan to another model or cluster, after checking them there.

    Raises:
        InputError: with every fault of the plan there.
    """
    run, problem = posed(subject, plan)
    return _checked(run, problem, renamed(plan, problem.job), None)


def posed(subject: PlanSubject, plan: Plan) -> tuple[RunFile, Problem]:
    """Return the run file, with the plan's decisions where it leaves them open, and its problem."""
    run = subject.run
    if run.train.precision == ANY_PRECISION:
        run = in_precision(run, plan.precision)
    if run.sync.method == AUTO:
        run = in_sync(run, plan.sync)
    return run, problem_of_subject(subject.model_copy(update={"run": run}))


def renamed(plan: Plan, job: Job) -> Plan:
    """Return a plan with the same decisions, and the names and places of another job's model and cluster."""
    places = derived_options(plan.sync, plan.stages, job.cluster)
    return plan.model_copy(
        update={
            "model": job.graph.name,
            "model_fingerprint": job.graph.fingerprint,
            "cluster": job.cluster.name,
            "cluster_fingerprint": job.cluster.fingerprint,
            "sync": plan.sync.model_copy(update={"options": {**plan.sync.options, **places}}),
        }
    )


def taking_over(job: PlannedJob, at_step: int, plan: Plan, prediction: Prediction | None) -> PlannedJob:
    """Return the job with a plan, checked like its own, that takes over from it at a step.

    Raises:
        InputError: with every fault of that plan.
    """
    return replace(job, later=Later(at_step, _checked(job.run, job.problem, plan, prediction)))


def changed_to(job: PlannedJob, plan: Plan, prediction: Prediction | None) -> PlannedJob:
    """Return the job with another plan, after checking it.

    Raises:
        InputError: with every fault of the plan.
    """
    return _checked(job.run, job.problem, plan, prediction)


def _checked(run: RunFile, problem: Problem, plan: Plan, prediction: Prediction | None) -> PlannedJob:
    if plan.model_fingerprint == problem.job.graph.fingerprint:
        problem = problem.choosing(other_choices(plan.layer_choices))
    if violations := plan_problems(plan, problem.job):
        raise InputError(violations)
    return PlannedJob(run=run, problem=problem, plan=plan, chosen_for=prediction)


def plan_problems(plan: Plan, job: Job) -> list[Violation]:
    """Return all reasons why a plan cannot run a job; empty if it can."""
    return check_plan(plan, job.graph, job.cluster) + job_problems(plan.layer_choices, job)


def _require_deadline(job: PlannedJob) -> None:
    """Refuse a searched job with plans that together take longer than the goal allows."""
    deadline, steps, seconds = job.run.goal.deadline_hours, 0, 0.0
    if deadline is None:
        return
    bests = [one.ranking.fitting[0] for one in job.all if one.ranking is not None]
    for one, best in zip(job.all, bests, strict=True):
        seconds += (one.last_step - steps) * best.step_s
        steps = one.last_step
    hours = seconds / 3600.0
    if hours > deadline:
        words = ", then ".join(best.words for best in bests)
        problem = f"{deadline:g}; {counted(steps, 'step')} of the best plan ({words}) take {hours:.3g} hours"
        raise InputError(Violation("goal.deadline_hours", problem, f"{hours:.3g}"))


def decided(problem: Problem, plan: Plan) -> Plan:
    """Return the plan after each method in use has seen the predicted step, in the order of the passes.

    Raises:
        InputError: when a method decides for a plan that cannot be compiled.
    """
    graph = problem.job.graph

    def predicted(plan: Plan) -> tuple[Program, Simulation]:
        program = compile_plan(plan, graph)
        return program, predict_priced(program, price(problem.cost_model, program, plan)).simulation

    for one in ordered_passes():
        if one.decide is not None:
            plan = one.decide(plan, graph, predicted)
    return plan
