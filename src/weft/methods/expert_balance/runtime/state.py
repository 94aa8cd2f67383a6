"""`ExpertBalance`: the roots of all mixtures of a rank, and the counts that their gradients wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from weft.describe.decoder import Experts
from weft.methods.expert_balance.kinds import BalancesExperts
from weft.methods.expert_balance.options import BY_INDEX, NAME, ExpertsTable, options_of
from weft.methods.expert_balance.places import first_places
from weft.methods.expert_balance.report import CHOSEN, DROPPED, FIGURES, LOADS, RANK_LOAD
from weft.methods.expert_balance.runtime.biases import RouterBiases
from weft.methods.expert_balance.runtime.census import Census
from weft.methods.expert_balance.runtime.layer import BalancedLayer, Parts
from weft.methods.expert_balance.runtime.loads import loads_of
from weft.methods.expert_balance.runtime.moves import ExpertMoves
from weft.methods.expert_balance.runtime.routers import watches_of
from weft.planning.planned_job import PlannedJob
from weft.program.program import NONE
from weft.run.methods import Making, MethodState, StepGate
from weft.run.resources import Resources
from weft.run.stage.experts import Capacity
from weft.run.stage.families.decoder import DecoderStage
from weft.run.stage.roots import Root
from weft.run.stage.taps import Passing
from weft.run.streams import Value
from weft.run.workspace import Workspace
from weft.sync.base import Group

# The names of the root of a layer and of its gradient; the layer's position follows.
SHARE, COEFFICIENT = "expert_share", "expert_coefficient"


class ExpertBalance(MethodState):
    """The balance of the stages with experts on one rank.

    Raises:
        InputError: if a stage was built without watches of its routers.
    """

    def __init__(self, making: Making) -> None:
        table, owed = options_of(making.plan), making.program.obligations.methods[NAME]
        assert table is not None, "a program owes a balance to a plan that asks for one"
        assert isinstance(owed, BalancesExperts)
        self._table: ExpertsTable = table
        self._device = making.device
        self.by_index = table.balance in BY_INDEX
        own = [stage for stage in owed.stages if stage in making.stages]
        watched = {stage: watches_of(stage, module) for stage, module in making.stages.items()}
        # Of frozen stages, too: evaluations watch them.
        self._watches = {layer: watch for _, each in watched.values() for layer, watch in each.items()}
        # Every rank has a stage, and every stage the sizes of the whole model.
        config = next(iter(watched.values()))[0].config
        decoder = config.architecture
        self._mixtures = [block + 1 for block in range(config.layers) if decoder.has_experts(block)]
        assert decoder.experts is not None, "only models with experts owe a balance"
        self._experts: Experts = decoder.experts
        self._sequence = sequence = making.plan.sequence
        # The ranks that have other tokens of the same samples, by layer.
        self._context = {layer: module.context for module, some in watched.values() for layer in some}
        most = table.most_tokens(sequence, self._experts.active, self._experts.count)
        capacity = None if most is None else Capacity(most, sequence)
        for module, _ in watched.values():
            if capacity is not None and isinstance(module, DecoderStage):
                module.limit_experts(capacity)
        # By stage, and by the position of the layer.
        self.layers: Mapping[int, Mapping[int, BalancedLayer]] = {
            stage: {
                layer: BalancedLayer(table, making.plan, module, stage, watch, capacity)
                for layer, watch in watches.items()
            }
            for stage, (module, watches) in watched.items()
            if stage in own
        }
        self.micro_batches = {stage: making.program.micro_batches_of(stage) for stage in own}
        # Of this rank, by stage and by the place of the mixture among all.
        self._biases = {
            stage: {self._mixtures.index(layer): bias for layer, bias in module.choice_biases().items()}
            for stage, module in making.stages.items()
            if table.bias_rate and stage in own and isinstance(module, DecoderStage)
        }
        # Counts of the micro-batches of a step so far, (layers, experts), by stage.
        self._so_far: dict[int, torch.Tensor] = {}
        self._ranks = making.plan.ep
        # The names of what the host reads of a step.
        lost = (DROPPED,) if table.capacity is not None else ()
        self.told = (LOADS, *FIGURES, *lost, *((RANK_LOAD,) if self._ranks > 1 else ()))
        self.moves: ExpertMoves | None = None

    def begin(self, resources: Resources) -> None:
        if self._ranks > 1:
            places = first_places(len(self._mixtures), self._experts.count, self._ranks)
            self.moves = ExpertMoves(self._mixtures, places, resources)

    def roots(self, stage: int) -> Sequence[Root]:
        return [
            Root(
                layer=layer,
                make=one.make,
                coefficient=partial(self._coefficient, layer, self._known(one)),
                reads_targets=True,
                left_as=f"{SHARE}.{layer}",
                ready=one.has_routed,
                forget=one.forget,
            )
            for layer, one in self.layers.get(stage, {}).items()
        ]

    def counted_together(self, stage: int, part: int) -> Sequence[int]:
        """Return the rank's micro-batches whose tokens a sum counts: the one at `part`, or all for NONE."""
        own = self.micro_batches[stage]
        return own if part == NONE else own[part : part + 1]

    def gradients(
        self, stage: int, part: int, shares: Sequence[Sequence[torch.Tensor]], group: Group
    ) -> list[torch.Tensor]:
        """Return the gradients of the roots of a stage's layers; every rank of the group calls it.

        Args:
            shares: the roots of each layer, of the micro-batches that are counted together.
        """
        own = [torch.stack([Parts.of(one).counts.double() for one in each]).sum(0) for each in shares]
        counted = torch.stack(own)
        if group.size > 1:
            group.all_reduce(counted)
        counts, share = counted, 1.0
        if self.by_index:
            share = 1.0 / len(self.micro_batches[stage])
            if self._table.balance == "buffer":
                counts = counted if part == 0 else self._so_far[stage] + counted
                self._so_far[stage] = counts
        layers = self.layers[stage].values()
        rows = zip(layers, counts, counted, strict=True)
        return [one.gradient(of_balance, own, share) for one, of_balance, own in rows]

    def loads(self, roots: Mapping[int, Sequence[torch.Tensor]], group: Group) -> dict[str, torch.Tensor]:
        """Return the loads of a step by name, as `loads_of`; every rank of the group calls it."""
        # Tensor ranks count the same tokens, each all of them.
        copies = {layer: one.copies for layers in self.layers.values() for layer, one in layers.items()}
        found = loads_of(self._mixtures, self._experts.count, roots, copies, group, self._device)
        return found if self.moves is None else found | self.moves.count(found[LOADS])

    def moves_after(self, done: int) -> bool:
        every = self._table.move_every
        return every is not None and self.moves is not None and done % every == 0

    def move(self, done: int, job: PlannedJob) -> Mapping[str, Any] | None:
        assert self.moves is not None, "it has said that it may move experts"
        return self.moves.decide(done, job, steps=self._table.move_every or 1)

    def series(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        return {name: one for name in (LOADS,) if (one := workspace.values.get((name, NONE, NONE)))}

    def figures(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        return {name: one for name in self.told[1:] if (one := workspace.values.get((name, NONE, NONE)))}

    @contextmanager
    def watching(self) -> Iterator[Callable[[], Mapping[str, Any]]]:
        census = Census(self._mixtures, self._experts, self._device, sequence=self._sequence)
        for layer, watch in self._watches.items():
            watch.evaluated = partial(census.see, layer, self._context[layer])
        try:
            yield lambda: {CHOSEN: census.collect()}
        finally:
            for watch in self._watches.values():
                watch.evaluated = None

    def gate(self, workspace: Workspace, stage: int) -> StepGate | None:
        biases = self._biases.get(stage)
        if not biases:
            return None
        return RouterBiases(workspace, biases, self._table.bias_rate)

    def _known(self, layer: BalancedLayer) -> Value[torch.Tensor] | None:
        """Return the gradient of a root that depends on its own pass alone."""
        if self._table.counts:
            return None
        nothing = torch.zeros(layer.experts.count, dtype=torch.float64, device=self._device)
        return Value.of(layer.gradient(nothing, nothing, 0.0))

    def _coefficient(
        self, layer: int, known: Value[torch.Tensor] | None, workspace: Workspace, now: Passing
    ) -> Value[torch.Tensor]:
        number = now.micro_batch if self.by_index else NONE
        return known or workspace.values[f"{COEFFICIENT}.{layer}", now.stage, number]
