"""The pieces of a rank's stages as its program has them, and how well codecs do. Servers have sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.describe.synchronisation import options_in
from weft.methods.clan.kinds import CompressesBothWays
from weft.methods.clan.options import NAME, ClanOptions
from weft.methods.clan.report import CONTRACTION, ERRORS, metric
from weft.methods.clan.runtime.aggregator import Aggregator
from weft.methods.clan.runtime.exchange import TwoWaySums
from weft.methods.clan.runtime.served_group import ServedGroup
from weft.program.program import NONE
from weft.program.rank_program import RankProgram
from weft.run.methods import Making, MethodState, PartOfSum
from weft.run.parallel.tensor_stage import TensorParallel
from weft.run.resources import Resources, groups_of_stages
from weft.run.state.precision import STEPPED
from weft.run.transport.mesh import Groups
from weft.run.workspace import Workspace
from weft.sync.base import Group


class PiecesState(MethodState):
    """The cut of the stages' gradients."""

    def __init__(self, making: Making) -> None:
        owed = making.program.obligations.methods[NAME]
        assert isinstance(owed, CompressesBothWays), "the method's own obligation"
        self._owed, self._program = owed, making.program
        stages = making.plan.stages
        self._holders = [sum(len(one.ranks) for one in stage.replicas) for stage in stages]

    def begin(self, resources: Resources) -> None:
        synchroniser, servers = resources.synchroniser, len(self._owed.servers)
        assert isinstance(synchroniser, TwoWaySums), "the method brings its own"
        groups, served = resources.groups.collective, _served(self._program, resources.groups, servers)
        for stage, number in groups_of_stages(self._program, "reduce" if servers else "push").items():
            whole, pieces = _held_alike(resources, stage), self._owed.pieces[stage]
            synchroniser.cut(stage, pieces, groups[number], whole, served.get(stage))

    def shares(self, workspace: Workspace) -> Mapping[str, PartOfSum]:
        """Return this rank's shares of the means of all holders of each stage."""
        return _shares(workspace, self._holders)


class AggregatorState(MethodState):
    """The sums that a server owns; replicas take them for a checkpoint, and give them for another plan."""

    def __init__(self, making: Making) -> None:
        owed, options = making.program.obligations.methods[NAME], options_in(making.plan, NAME, ClanOptions)
        assert isinstance(owed, CompressesBothWays), "the method's own obligation"
        assert options is not None, "the method's own options"
        self._owed = owed
        self._holders = [1] * len(making.plan.stages)
        self.aggregator = Aggregator(options, STEPPED[making.plan.precision], making.device)
        self._served = _served(making.program, making.groups, len(owed.servers))

    def begin(self, resources: Resources) -> None:
        for stage, served in self._served.items():
            self.aggregator.cut(stage, self._owed.pieces[stage], served)

    def group_of(self, stage: int) -> Group:
        """Return the replicas of a stage and all servers."""
        return self._served[stage].there

    def shares(self, workspace: Workspace) -> Mapping[str, PartOfSum]:
        return _shares(workspace, self._holders)

    def agreed(
        self, own: Mapping[str, torch.Tensor], parameters: Mapping[str, str]
    ) -> Mapping[str, torch.Tensor]:
        self.aggregator.give_errors()
        return own

    def rank_tensors(self) -> Mapping[str, torch.Tensor]:
        return self.aggregator.tensors()

    def rebase(self) -> None:
        self.aggregator.take_errors()


def state_of(making: Making) -> MethodState:
    """Return the state of a replica's pieces, or of a server's sums."""
    return PiecesState(making) if making.program.stages else AggregatorState(making)


def _served(program: RankProgram, groups: Groups, servers: int) -> dict[int, ServedGroup]:
    """Return the groups with servers, by stage in rising order; none if there are no servers."""
    there, back = (groups_of_stages(program, kind) for kind in ("push_to_servers", "pull_from_servers"))
    pairs = {
        stage: (groups.collective[there[stage]], groups.collective[back[stage]]) for stage in sorted(there)
    }
    return {stage: ServedGroup(*pair, servers) for stage, pair in pairs.items()}


def _shares(workspace: Workspace, holders: Sequence[int]) -> Mapping[str, PartOfSum]:
    if not workspace.training:
        return {}
    found = {}
    for name in (CONTRACTION, ERRORS):
        for stage, number in enumerate(holders):
            value = workspace.values.get((name, stage, NONE))
            found[metric(name, stage)] = PartOfSum(() if value is None else (value,), 1.0 / number)
    return found


def _held_alike(resources: Resources, stage: int) -> list[int]:
    """Return the numbers of the parameters that all tensor ranks hold whole.

    These ranks must decode the same, also where their other parameters have different lengths.
    """
    module = resources.stages[stage]
    if not isinstance(module, TensorParallel) or module.tensor.size == 1:
        return []
    divided = {id(one) for name, one in module.named_parameters() if name in module.divisions}
    return [
        number for number, one in enumerate(resources.buckets[stage].parameters) if id(one) not in divided
    ]
