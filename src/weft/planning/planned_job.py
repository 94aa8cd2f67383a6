"""`PlannedJob`: a run file, the problem it poses, the chosen plan, and what is predicted of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weft.bundles import parts
from weft.describe.cluster import Cluster
from weft.describe.one_line import one_line
from weft.describe.plan import Plan
from weft.describe.plan_file import PlanFile
from weft.describe.plan_subject import cluster_of_run
from weft.describe.prediction import COMMUNICATOR_SPREAD, Prediction
from weft.describe.run_file import RunFile
from weft.describe.run_tables.training import GO_ON, KEPT_STATES
from weft.describe.synchronisation import is_logged
from weft.describe.this_machine import THIS_MACHINE
from weft.describe.units import counted, format_bytes, format_seconds
from weft.errors import Violation
from weft.planning.assumed_links import assumed_links
from weft.planning.compile import (
    compile_evaluation,
    compile_evaluation_part,
    compile_part,
    compile_plan,
)
from weft.planning.long_steps import predict_long
from weft.planning.measured_changes import changes_of
from weft.planning.planners import Ranking
from weft.planning.problem import Problem
from weft.planning.throughput import Throughput, throughput
from weft.predict.cost.communicators import SOURCE, Communicators
from weft.predict.cost.memory import STEPPED_BYTES, stage_parameters
from weft.predict.cost.placed_plan import PlacedPlan
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import KeptAway
from weft.predict.memory_parts import MemoryPart, memory_parts, reserve_part
from weft.predict.predict import PredictedStep, predict
from weft.program.arrays import Ints
from weft.program.program import Program
from weft.program.rank_program import RankProgram
from weft.program.verify import require_valid
from weft.timeline.figures import step_breakdown

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
