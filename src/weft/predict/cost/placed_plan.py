"""A plan on its cluster: the twins of each rank, the speeds of ranks, and their connections.

The tables do not depend on the number of micro-batches, so they price programs of several lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from weft.describe.added_layers import decided_layers
from weft.describe.amount import Shape
from weft.describe.cluster import Cluster
from weft.describe.device import Device
from weft.describe.layer_choices import with_choices
from weft.describe.layer_graph import LayerGraph
from weft.describe.loss_choice import other_choices
from weft.describe.one_line import one_line
from weft.describe.plan import LayerChoice, Plan, Recompute
from weft.predict.corrections import Correction
from weft.predict.cost.communicators import Communicators, communicators
from weft.predict.cost.compute import ComputeModel, StageTimes
from weft.predict.cost.exchanges import Exchanges, StageExchanges, stage_exchanges
from weft.predict.cost.network import Network
from weft.predict.cost.plan_links import PlanLinks
from weft.predict.profile import LayerProfile, MachineMeasurement
from weft.program.arrays import Floats, Ints
from weft.program.codes import distinct_rows
from weft.program.fold import twins_of
from weft.program.kinds import STEP
from weft.program.layout import rank_rows
from weft.program.program import NONE, Program

BytesOf = Callable[[LayerGraph, Sequence[int], Shape, str, Device, Recompute], int]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """A model, a cluster, their measurements, the correction from measured steps, and the way between ranks.

    Create one for many plans: they share evaluated layers and links. No price depends on earlier prices.
    """

    graph: LayerGraph
    cluster: Cluster
    machine: MachineMeasurement | None = None
    profile: LayerProfile | None = None
    correction: Correction | None = None
    through_host: bool = False

    __repr__ = one_line

    def of(self, plan: Plan) -> CostModel:
        """Return the model with the costs of the plan's loss and of what methods change in its layers.

        It shares evaluated layers and links.

        Raises:
            InputError: with every fault of the plan's choices for layers.
        """
        choices, decided = plan.layer_choices, decided_layers(plan, self.graph)
        has_them = choices == other_choices(choices)
        if has_them and not decided:
            return self
        key = choices, decided
        if key not in self._of_plans:
            graph = self.graph if has_them else with_choices(self.graph, choices)
            for method, value in decided:
                graph = method.change(graph, value)
            self._of_plans[key] = changed = replace(self, graph=graph)
            vars(changed).update(compute=self.compute, network=self.network)
        return self._of_plans[key]

    @cached_property
    def _of_plans(self) -> dict[tuple[tuple[LayerChoice, ...], Hashable], CostModel]:
        return {}

    @cached_property
    def compute(self) -> ComputeModel:
        return ComputeModel(machine=self.machine, profile=self.profile, correction=self.correction)

    @cached_property
    def network(self) -> Network:
        return Network(
            cluster=self.cluster,
            machine=self.machine,
            correction=self.correction,
            through_host=self.through_host,
        )


@dataclass(frozen=True, kw_only=True)
class PlacedPlan:
    """Tables of a plan, built on first use. `program` is any of its programs, of any length."""

    program: Program
    plan: Plan
    model: CostModel

    def shape(self, stage: int, devices: int | None = None) -> Shape:
        """Return the shape of a rank's part of a stage, in the first replica or on a device set."""
        shape = self._shapes[stage]
        degree = 0 if devices is None else self._sets[0][devices][0]
        return replace(shape, tensor_parallel=degree) if degree else shape

    @cached_property
    def _shapes(self) -> tuple[Shape, ...]:
        return tuple(map(self.plan.shape, range(len(self.plan.stages))))

    @cached_property
    def ranks_of_stage(self) -> tuple[Ints, ...]:
        """By stage, the ranks of its replicas, shape (replicas, ranks of one).

        It is -1 behind the ranks of replicas with fewer of them than others.
        """
        return tuple(rank_rows([copy.ranks for copy in stage.replicas]) for stage in self.plan.stages)

    def holders(self, stage: int) -> Iterator[tuple[Ints, Shape]]:
        """Yield the ranks of a stage whose replicas have equally many tensor ranks, and their shape."""
        for copies in self.plan.like_replicas(stage):
            ranks = self.ranks_of_stage[stage][copies]
            yield ranks[ranks != NONE], self.plan.shape(stage, copies[0])

    @cached_property
    def twins(self) -> Mapping[int, Ints]:
        """The ranks that each rank with instructions stands for.

        A rank of a folded program stands for several. Each of its instructions has their highest cost.
        """
        return twins_of(self.program, self.ranks_of_stage)

    @cached_property
    def _sets(self) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], Ints]:
        """The combinations of paces among the twins of a rank, each after the rank's tensor degree, and each
        rank's index.

        The degree is 0 if it follows from the stage.
        """
        places, degree = self.model.network.places, self._degree_of_rank
        sets: dict[tuple[int, tuple[int, ...]], int] = {}
        index = np.zeros(self.program.ranks, dtype=np.int64)
        for rank, twins in self.twins.items():
            paces = set(places.pace[twins].tolist()) if len(places.paces) > 1 else (0,)
            index[rank] = sets.setdefault((int(degree[rank]), tuple(sorted(paces))), len(sets))
        return tuple(sets), index

    @cached_property
    def _degree_of_rank(self) -> Ints:
        """By rank, its number of tensor ranks if replicas of a stage have unlike ones, else 0."""
        degree = np.zeros(self.program.ranks, dtype=np.int64)
        for index, stage in enumerate(() if self.plan.has_like_replicas else self.plan.stages):
            for copy, tensor in zip(stage.replicas, self.plan.replica_degrees[index], strict=True):
                degree[list(copy.ranks)] = tensor
        return degree

    @cached_property
    def _paces(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """The pairs of (group of nodes, speed) of each device set."""
        places = self.model.network.places
        return tuple(tuple(places.paces[pace] for pace in paces) for _, paces in self._sets[0])

    @cached_property
    def device_sets(self) -> tuple[tuple[Device, ...], ...]:
        """The combinations of devices among the twins of a rank; unlike tensor degrees have sets apart."""
        groups = self.model.cluster.groups
        return tuple(tuple(groups[group].device for group, _ in paces) for paces in self._paces)

    @cached_property
    def speed_sets(self) -> tuple[tuple[float, ...], ...]:
        """Relative speed of each device of `device_sets`."""
        return tuple(tuple(speed for _, speed in paces) for paces in self._paces)

    @property
    def device_set_of_rank(self) -> Ints:
        """Index into `device_sets` and `speed_sets`, shape (ranks,)."""
        return self._sets[1]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The existing pairs of (stage, device set); servers hold no stage."""
        columns = self.program.columns
        held = columns.rank < self.plan.servers.start
        sets, stages = self.device_set_of_rank[columns.rank[held]], columns.stage[held]
        first = distinct_rows(stages, sets)[0]
        return tuple(sorted(zip(stages[first].tolist(), sets[first].tolist(), strict=True)))

    @cached_property
    def stage_times(self) -> Mapping[tuple[int, int], tuple[StageTimes, ...]]:
        """Times by place, one for each device of its set."""
        return {
            (stage, devices): tuple(
                self.model.compute.stage_times(
                    self.model.graph,
                    self.plan.stages[stage].layers,
                    self.shape(stage, devices),
                    self.plan.precision,
                    device,
                    recompute=self.plan.stages[stage].recompute,
                    update_share=1.0 / self.plan.sharers(stage),
                    optimizer=self.plan.optimizer,
                    launch=self.plan.launch,
                )
                for device in self.device_sets[devices]
            )
            for stage, devices in self.places
        }

    @cached_property
    def kept_bytes(self) -> Ints:
        """Bytes that a micro-batch leaves in a stage, on the worst device; shape (stages, device sets)."""
        return self._per_place(self.model.compute.kept_bytes)

    @cached_property
    def kept_without_recomputation(self) -> Ints:
        """As `kept_bytes`, if the stages keep everything."""
        if all(stage.recompute == "none" for stage in self.plan.stages):
            return self.kept_bytes
        return self._per_place(lambda *asked: self.model.compute.kept_bytes(*asked[:-1]))

    @cached_property
    def taken_bytes(self) -> Ints:
        """The most bytes that a backward pass takes beside them; shape (stages, device sets)."""
        return self._per_place(self.model.compute.taken_bytes)

    def _per_place(self, bytes_of: BytesOf) -> Ints:
        table = np.zeros((len(self.plan.stages), len(self.device_sets)), dtype=np.int64)
        for index, devices in self.places:
            stage, shape = self.plan.stages[index], self.shape(index, devices)
            table[index, devices] = max(
                bytes_of(self.model.graph, stage.layers, shape, self.plan.precision, device, stage.recompute)
                for device in self.device_sets[devices]
            )
        return table

    @cached_property
    def communicators(self) -> Communicators:
        """The communicators of every rank, and their bytes."""
        return communicators(self.program, self.plan, self.model.network, self.twins)

    @cached_property
    def slowdowns(self) -> Floats:
        """Factors of overlapping computations and transfers, for each rank's worst twin; shape (2, ranks)."""
        sets = [[self.model.compute.slowdowns(device) for device in devices] for devices in self.device_sets]
        worst = np.array([np.max(factors, axis=0) for factors in sets]).reshape(-1, 2)
        return worst[self.device_set_of_rank].T

    def read_gradients_s(self, rank: int) -> float:
        """Return the seconds in which the slowest twin of a rank reads its share of the gradients.

        Replicas that hold the same summed gradient each read an equal share of it.
        """
        devices = int(self.device_set_of_rank[rank])
        seconds = 0.0
        for stage in self._trained_stages[rank]:
            copies = len(self.plan.stages[stage].replicas) // self.plan.sharers(stage)
            slowest = max(
                times.read_gradients_s / speed
                for times, speed in zip(
                    self.stage_times[stage, devices], self.speed_sets[devices], strict=True
                )
            )
            seconds += slowest / copies
        return seconds

    @cached_property
    def _trained_stages(self) -> Mapping[int, tuple[int, ...]]:
        """The stages of each rank that steps any."""
        columns = self.program.columns
        rows = np.flatnonzero(columns.kind == STEP)
        stages: dict[int, tuple[int, ...]] = {}
        for rank, stage in zip(columns.rank[rows].tolist(), columns.stage[rows].tolist(), strict=True):
            stages[rank] = (*stages.get(rank, ()), stage)
        return stages

    @cached_property
    def _stage_exchanges(self) -> Mapping[int, StageExchanges]:
        """Exchanges outside the times of stages."""
        network = self.model.network
        return stage_exchanges(self.plan, self.model.graph, network, self.ranks_of_stage, self._timed)

    @cached_property
    def exchange_half_width(self) -> float:
        """The half-width of the interval of the least certain exchange inside computations."""
        return max((one.half_width for one in self._stage_exchanges.values()), default=0.0)

    @cached_property
    def _exchanges(self) -> Mapping[int, tuple[tuple[Exchanges, ...], Ints]]:
        """By stage with several ranks per replica: exchanges by kind of place, kind of each replica."""
        found = {}
        for stage, kinds in self._stage_exchanges.items():
            known = list(kinds.exchanges)
            if self.program.kept_replica is not None:
                timed = [
                    self._timed(stage, int(self.ranks_of_stage[stage][first, 0])) for first in kinds.first
                ]
                known = [_worst(known, timed, contained) for contained in timed]
            found[stage] = tuple(known), kinds.of_replica
        return found

    def exchanges_of(self, stage: int, replica: int) -> Exchanges:
        """Return seconds of the exchanges among a replica's ranks; of several folded replicas, the worst."""
        if stage not in self._exchanges:
            return Exchanges()
        known, of_replica = self._exchanges[stage]
        return known[int(of_replica[replica])]

    def _timed(self, stage: int, first_rank: int) -> bool:
        """Return True if the times of a stage contain the exchanges of a replica's tensor ranks."""
        device = self.model.cluster.device_of(first_rank)
        return self.model.compute.contains_exchanges(device, self.shape(stage))

    @cached_property
    def links(self) -> PlanLinks:
        """Connections between the ranks."""
        network, servers = self.model.network, frozenset(self.plan.servers)
        return PlanLinks(program=self.program, network=network, twins=self.twins, servers=servers)


def _worst(known: Sequence[Exchanges], timed: Sequence[bool], contained: bool) -> Exchanges:
    """Return the longest exchanges among kinds whose stage times contain tensor exchanges iff `contained`."""
    alike = (one for one, inside in zip(known, timed, strict=True) if inside == contained)
    return Exchanges(*map(max, zip(*alike, strict=True)))
