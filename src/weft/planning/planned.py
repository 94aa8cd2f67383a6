"""`PlannedJob`: a run file, the problem it poses and the chosen plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weft.bundles import parts
from weft.describe.cluster import Cluster
from weft.describe.job import Job
from weft.describe.layer_choices import job_problems
from weft.describe.loss_choice import other_choices
from weft.describe.one_line import one_line
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanFile, check_plan
from weft.describe.plan_subject import PlanSubject, cluster_of_run
from weft.describe.prediction import COMMUNICATOR_SPREAD, Prediction
from weft.describe.run_file import RunFile
from weft.describe.run_tables.planning import PlanTable
from weft.describe.run_tables.training import ANY_PRECISION, GO_ON, KEPT_STATES
from weft.describe.synchronisation import AUTO, DENSE, derived_options, is_logged
from weft.describe.this_machine import THIS_MACHINE
from weft.describe.units import counted, format_bytes, format_seconds
from weft.errors import InputError, Violation
from weft.moves.registry import refused_pins
from weft.planning.assumed_links import assumed_links
from weft.planning.compile import (
    compile_evaluation,
    compile_evaluation_part,
    compile_part,
    compile_plan,
)
from weft.planning.goals import goal_value, goal_words, require_prices
from weft.planning.long_steps import predict_long
from weft.planning.measured_changes import changes_of
from weft.planning.nothing_fits import nothing_fits
from weft.planning.planners import Candidate, Planner, Ranking, get_planner
from weft.planning.precisions import in_precision, searched_in_each
from weft.planning.problem import Problem, problem_of_run, problem_of_subject
from weft.planning.synchronisations import decided_sync, in_sync, merged, synchronised_in_each
from weft.planning.throughput import Throughput, throughput
from weft.planning.ties import break_ties
from weft.predict.cost.communicators import SOURCE, Communicators
from weft.predict.cost.memory import STEPPED_BYTES, stage_parameters
from weft.predict.cost.placed_plan import PlacedPlan
from weft.predict.cost.price import price
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import KeptAway
from weft.predict.memory_parts import MemoryPart, memory_parts, reserve_part
from weft.predict.predict import PredictedStep, predict, predict_priced
from weft.predict.simulator import Simulation
from weft.program.arrays import Ints
from weft.program.passes import ordered_passes
from weft.program.program import Program
from weft.program.rank_program import RankProgram
from weft.program.verify import require_valid
from weft.timeline.figures import step_breakdown

DEFAULT_PLANNER = "weft"
# The states that ranks keep in host memory to go on when others die.
TO_GO_BACK = "states to go back to"


class Later(NamedTuple):
    """A planned job that takes over after `at_step` steps."""

    at_step: int
    job: PlannedJob


@dataclass(frozen=True)
class PlannedJob:
    """A job that can run. `ranking` is None for a given plan, without a search.

    `chosen_for` is the prediction that decided the choice of the plan, None without one. The program is
    compiled and verified, and the step predicted on every rank, at first use.
    """

    run: RunFile
    problem: Problem
    plan: Plan
    ranking: Ranking | None = None
    chosen_for: Prediction | None = None
    later: Later | None = None

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        plan = self.plan
        step = "" if self.chosen_for is None else f", step {format_seconds(self.chosen_for.step_s)}"
        found = "given" if self.ranking is None else f"best of {len(self.ranking.candidates)} layouts"
        return f"{plan.model} on {plan.cluster}: {found}{step}, plan {plan.plan_id}"

    @property
    def last_step(self) -> int:
        """The number of finished steps when this plan ends."""
        return self.run.train.steps if self.later is None else self.later.at_step

    @property
    def all(self) -> tuple[PlannedJob, ...]:
        """This job and the jobs that take over from it, one after the other."""
        return (self,) if self.later is None else (self, *self.later.job.all)

    @cached_property
    def program(self) -> Program:
        """The whole program, verified."""
        program = compile_plan(self.plan, self.problem.job.graph)
        require_valid(program)
        return program

    @cached_property
    def evaluation(self) -> Program:
        """The whole forward-only program, verified."""
        program = compile_evaluation(self.plan, self.problem.job.graph)
        require_valid(program)
        return program

    def parts(self, rank: int) -> tuple[RankProgram, RankProgram]:
        """Return one rank's parts of the training and of the forward-only program, compiled by themselves.

        Raises:
            InputError: when the plan has no such rank.
        """
        plan, graph = self.plan, self.problem.job.graph
        return compile_part(plan, graph, rank), compile_evaluation_part(plan, graph, rank)

    @property
    def _placed(self) -> PlacedPlan:
        model = self.problem.cost_model.of(self.plan)
        return PlacedPlan(program=self.program, plan=self.plan, model=model)

    @cached_property
    def in_host_memory(self) -> Mapping[str, Ints]:
        """The most bytes that each rank keeps in the memory of its host, by name; empty if it keeps none."""
        methods, stages = self.plan.methods, len(self.plan.stages)
        kept = [one for one in parts(KeptAway) if any(one.stages(methods, stages))]
        found = {TO_GO_BACK: self._bytes_to_go_back()} if self.run.run.on_death == GO_ON else {}
        if kept:
            pricing = Pricing(program=self.program, placed=self._placed)
            found |= {name: held for one in kept for name, held in one.held(pricing).items()}
        return found

    def _bytes_to_go_back(self) -> Ints:
        """Return the bytes of each rank's copies of its weights, their errors and its optimizer states."""
        plan, placed, graph = self.plan, self._placed, self.problem.job.graph
        stepped = STEPPED_BYTES[plan.precision]
        of_each = KEPT_STATES * (2 * stepped + plan.optimizer.kept_bytes(stepped))
        found = np.zeros(plan.ranks, dtype=np.int64)
        for index, stage in enumerate(plan.stages):
            for held, shape in placed.holders(index):
                found[held] += of_each * stage_parameters(graph, stage.layers, shape)
        return found

    @cached_property
    def predicted(self) -> PredictedStep:
        return predict(self.problem.cost_model, self.plan, self.program)

    @cached_property
    def steps_at_half(self) -> Mapping[str, float]:
        """Predicted seconds of a step with half the bandwidth of assumed links, by their key in `assumed`."""
        problem, found = self.problem, {}
        for links in assumed_links(problem.job.cluster, problem.measurements):
            other = replace(problem, job=replace(problem.job, cluster=links.halved))
            # As planners predict candidates: a whole program of thousands of ranks takes minutes.
            found[links.key] = predict_long(other.cost_model, self.plan).prediction.step_s
        return found

    @property
    def idle(self) -> Mapping[str, int]:
        """Count of devices that the plan leaves idle, by group of nodes."""
        cluster = self.problem.job.cluster
        ranks = range(self.plan.ranks, cluster.ranks)
        return Counter(cluster.group_of(rank).name for rank in ranks)

    @property
    def searched(self) -> Ranking:
        """The ranking of a searched plan; a given plan has none."""
        assert self.ranking is not None, "a searched plan has a ranking"
        return self.ranking

    @property
    def memory_bytes(self) -> list[int]:
        """The memory of the device of each of the plan's ranks."""
        cluster = self.problem.job.cluster
        return [cluster.device_of(rank).memory_bytes for rank in range(self.plan.ranks)]

    @property
    def usable_bytes(self) -> list[int]:
        """The memory on each rank's device that its reserve and its communicators leave to tensors."""
        left: list[int] = (np.array(self.unreserved_bytes) - self.communicators.held_bytes).tolist()
        return left

    @property
    def unreserved_bytes(self) -> list[int]:
        """The memory on each rank's device that its reserve leaves to tensors and communicators."""
        left: list[int] = self.problem.cost_model.network.places.usable_bytes[: self.plan.ranks].tolist()
        return left

    @property
    def communicators(self) -> Communicators:
        """The communicators of every rank, and their bytes."""
        return self._placed.communicators

    @property
    def fullest_rank(self) -> int:
        """The first rank with the largest share of its memory in use at its peak."""
        shares = np.array(self.predicted.prediction.peak_bytes) / np.array(self.memory_bytes)
        return int(np.argmax(shares))

    def memory_parts(self, rank: int) -> list[MemoryPart]:
        """Return the parts of a rank's memory at its predicted peak, and those beside it.

        These are the rank's communicators and the reserve of its device.
        """
        return [*self.peak_parts(rank), *self._parts_beside(rank)]

    def peak_parts(self, rank: int) -> list[MemoryPart]:
        """Return the parts of a rank's memory that its program allocates, at its predicted peak."""
        return memory_parts(self._placed, self.program, self.predicted, rank)

    def _parts_beside(self, rank: int) -> list[MemoryPart]:
        number, held_bytes = (int(each[rank]) for each in self.communicators)
        buffers = MemoryPart(f"communicators ({number})", held_bytes, COMMUNICATOR_SPREAD, SOURCE)
        reserve = reserve_part(self.problem.job.cluster.device_of(rank))
        return [buffers, reserve] if held_bytes else [reserve]

    @property
    def prediction(self) -> Prediction:
        """The prediction that decided the choice of the plan, else the prediction of it now."""
        return self.chosen_for or self.predicted.prediction

    @property
    def file(self) -> PlanFile:
        """The plan with its prediction and subject, for a file."""
        return PlanFile(self.plan, self.prediction, self.problem.subject(self.run))

    @property
    def uncounted(self) -> list[Violation]:
        """One line if the optimizer keeps more bytes than its plan counts, or exchanges other sums."""
        needs, planned = self.problem.job.optimizer, self.plan.optimizer
        kept, counted = (one.kept_bytes(STEPPED_BYTES[self.plan.precision]) for one in (needs, planned))
        name, found = self.run.optimizer.name, []
        if kept > counted:
            found.append(f"counts {counted} bytes of states per parameter; {name} keeps {kept}")
        if needs.whole_sums != planned.whole_sums:
            found.append(f"counts other sums over whole tensors than {name} takes")
        if needs.orthogonalisations != planned.orthogonalisations:
            found.append(f"counts other orthogonalisations of matrices than {name} makes")
        return [Violation("plan: optimizer", f"{problem}; plan the run again") for problem in found]

    @property
    def unlogged(self) -> list[Violation]:
        """One line if the run asks for a log of weights, and the plan sends nothing for it."""
        if not self.run.checkpoint.weight_log:
            return []
        problem = None
        if not is_logged(self.plan.sync):
            problem = f"replicas send no payloads of few bits for weights, with sync {self.plan.sync.name!r}"
        elif any(self.plan.grid(stage).ranks > 1 for stage in range(len(self.plan.stages))):
            problem = "a log is kept of replicas without tensor or context ranks"
        return [] if problem is None else [Violation("checkpoint.weight_log", problem, "false")]

    @property
    def elsewhere(self) -> list[Violation]:
        """One line if the job is for the machine that planned it, and this is another one."""
        if self.run.cluster.use != THIS_MACHINE or self.ranking is not None:
            return []  # a searched plan is of here and now
        planned, here = self.problem.job.cluster, cluster_of_run(self.run)
        if planned.fingerprint == here.fingerprint:
            return []
        problem = f"planned on another machine ({_devices(planned)}); here: {_devices(here)}; plan it again"
        return [Violation("cluster.use", problem, f"--on {THIS_MACHINE}")]

    @property
    def misplaced(self) -> list[Violation]:
        """One line for each reason why the later plan cannot take over."""
        if self.later is None:
            return []
        at_step, steps, found = self.later.at_step, self.run.train.steps, []
        ranks, then_ranks = self.plan.ranks, self.later.job.plan.ranks
        if at_step >= steps:
            problem = f"{at_step}; the run ends with step {steps}, before that plan has one"
            found.append(Violation("plan.then.at_step", problem, str(max(1, steps - 1))))
        if ranks != then_ranks:
            used = counted(then_ranks, "rank")
            problem = f"its plan uses {used}, and a run keeps the {ranks} that it begins with"
            found.append(Violation("plan.then", problem, f"degrees for {counted(ranks, 'rank')}"))
        for change in changes_of(self.plan):
            every = counted(change.every(self.plan), "step")
            problem = f"the run may change its plan by itself after every {every}"
            found.append(Violation("plan.then", problem, f"{change.key} = 0"))
        return found

    @property
    def throughput(self) -> Throughput:
        """The throughput of the predicted step, on the devices of the plan that hold stages."""
        return self.throughput_of(self.prediction.step_s)

    def throughput_of(self, step_s: float) -> Throughput:
        """Return the throughput of a step of this length, on the devices that hold stages."""
        reads_tokens = self.problem.model.reads_tokens
        return throughput(self.problem.job, self.plan.servers.start, step_s, reads_tokens=reads_tokens)

    @cached_property
    def step_breakdown(self) -> dict[str, float]:
        """Predicted seconds of a mean rank by cause; their sum is the step."""
        simulation = self.predicted.simulation
        peer, cycle = self.program.columns.peer, self.program.steps_per_cycle
        return step_breakdown(simulation.timeline, peer, simulation.step_s, cycle=cycle)

    @cached_property
    def launching_share(self) -> float:
        """The seconds in which hosts issue the kernels of passes, as a share of the passes' seconds.

        It is 1 where all devices wait for their hosts.
        """
        issue_s = passes_s = 0.0
        for (index, _), each in self._placed.stage_times.items():
            stage = self.plan.stages[index]
            exchanged_s = self._placed.exchanges_of(index, 0).of_both(stage.recompute)
            for times in each:
                issue_s += stage.splits * times.issue_s
                passes_s += stage.splits * max(times.issue_s, times.passes_s + exchanged_s)
        return issue_s / passes_s if passes_s else 0.0


def _devices(cluster: Cluster) -> str:
    return ", ".join(
        f"{group.devices} {group.device.name} of {format_bytes(group.device.memory_bytes)}"
        for group in cluster.groups
    )


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
