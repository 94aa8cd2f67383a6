"""`PiecesState`: the pieces of a rank's stages as its program has them, and how well codecs do."""

from __future__ import annotations

from collections.abc import Mapping

from weft.methods.clan.kinds import CompressesBothWays
from weft.methods.clan.options import NAME
from weft.methods.clan.report import CONTRACTION, ERRORS, metric
from weft.methods.clan.runtime.exchange import TwoWaySums
from weft.program.program import NONE
from weft.run.methods import Making, MethodState, PartOfSum
from weft.run.parallel.tensor_stage import TensorParallel
from weft.run.resources import Resources, groups_of_stages
from weft.run.workspace import Workspace


class PiecesState(MethodState):
    """The cut of the stages' gradients."""

    def __init__(self, making: Making) -> None:
        owed = making.program.obligations.methods[NAME]
        assert isinstance(owed, CompressesBothWays), "the method's own obligation"
        self._pieces, self._program = owed.pieces, making.program
        stages = making.plan.stages
        self._holders = [sum(len(one.ranks) for one in stage.replicas) for stage in stages]

    def begin(self, resources: Resources) -> None:
        synchroniser, groups = resources.synchroniser, groups_of_stages(self._program, "push")
        assert isinstance(synchroniser, TwoWaySums), "the method brings its own"
        for stage, number in groups.items():
            group, whole = resources.groups.collective[number], _held_alike(resources, stage)
            synchroniser.cut(stage, self._pieces[stage], group, whole)

    def shares(self, workspace: Workspace) -> Mapping[str, PartOfSum]:
        """Return this rank's shares of the means of all holders of each stage."""
        if not workspace.training:
            return {}
        found = {}
        for name in (CONTRACTION, ERRORS):
            for stage, holders in enumerate(self._holders):
                value = workspace.values.get((name, stage, NONE))
                found[metric(name, stage)] = PartOfSum(() if value is None else (value,), 1.0 / holders)
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
