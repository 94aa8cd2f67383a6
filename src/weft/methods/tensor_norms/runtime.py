"""The first parts of a step on one rank, and the sums over whole tensors between them.

A rank's optimizer adds up its own pieces of parameters. Their sums meet in a table of all parameters of the
stage. Exactly one rank counts an element: of the ranks with the same piece, the first one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.methods.tensor_norms.kinds import NAME
from weft.program.program import Instruction
from weft.program.rank_program import RankProgram
from weft.run.handlers.base import Issue
from weft.run.handlers.step import BegunStep, begin_step
from weft.run.methods import HandlerOf, Making, MethodState, StateOf
from weft.run.parallel.tensor_stage import TensorParallel, tensor_ranks, token_ranks
from weft.run.resources import Resources, groups_of_stages
from weft.run.state.votes import leaving_out
from weft.run.state.whole_sums import WholeSumsOptimizer
from weft.run.workspace import Workspace
from weft.sync.base import Group


class TensorTable:
    """The parameters of one stage, and this rank's pieces of them.

    Args:
        places: by piece, in the order of the optimizer's columns, the parameter's place in the stage.
        counts: by piece, whether this rank counts it.
        length: the number of the stage's parameters.
    """

    def __init__(self, places: list[int], counts: list[bool], length: int, device: torch.device) -> None:
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self._counts = torch.tensor(counts, dtype=torch.float64, device=device)
        self._length = length

    def whole(self, sums: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the sums of all ranks, shape (numbers, pieces), from those of this rank's pieces."""
        # Without a piece, an optimizer knows no device.
        sums = sums.to(self._counts.device)
        table = sums.new_zeros(len(sums), self._length)
        table[:, self._places] = sums * self._counts
        # Every rank gets the same bits, so that replicas stay equal.
        flat = sums.new_zeros(-(-table.numel() // group.size) * group.size)
        flat[: table.numel()] = table.flatten()
        group.add_up(flat)
        return flat[: table.numel()].view_as(table)[:, self._places]


class TensorNorms(MethodState):
    """The tables of a rank's stages."""

    def __init__(self, making: Making) -> None:
        self._program = making.program
        self.tables: Mapping[int, TensorTable] = {}

    def begin(self, resources: Resources) -> None:
        self.tables = {stage: _table(resources, self._program, stage) for stage in resources.stages}


def _table(resources: Resources, program: RankProgram, stage: int) -> TensorTable:
    module, optimizer = resources.stages[stage], resources.optimizers[stage]
    assert isinstance(optimizer, WholeSumsOptimizer), "it exchanges sums"
    stepped = resources.stepped.get(stage)
    parameter_of = {} if stepped is None else {id(one.stepped): one.parameter for one in stepped.pieces}
    place_of = {id(parameter): place for place, parameter in enumerate(module.parameters())}
    apart = {id(parameter) for one in resources.methods.values() for parameter in one.apart(stage)}
    divisions = module.divisions if isinstance(module, TensorParallel) else {}
    divided = {id(one) for name, one in module.named_parameters() if name in divisions}

    def leads(*kinds: str) -> bool:
        group = groups_of_stages(program, *kinds).get(stage)
        return group is None or resources.groups.collective[group].place == 0

    replicas_lead, islands_lead = leads("gather", "reduce"), leads("reduce_across")
    leads_tensor = tensor_ranks(module).place == 0

    def counts(parameter: torch.nn.Parameter) -> bool:
        own_shard = stage in resources.shards and id(parameter) not in apart
        return (own_shard or replicas_lead) and (id(parameter) in divided or leads_tensor)

    parameters = [parameter_of.get(id(one), one) for one in optimizer.tensors]
    first = islands_lead and token_ranks(module).place == 0
    return TensorTable(
        [place_of[id(one)] for one in parameters],
        [first and counts(one) for one in parameters],
        len(place_of),
        resources.device,
    )


def tensor_norms(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run a part of a stage's step and add up its sums over all ranks of the stage."""
    stage, resources = instruction.stage, workspace.resources
    state, group = resources.methods[NAME], resources.groups.collective[instruction.group]
    optimizer = resources.optimizers[stage]
    assert isinstance(state, TensorNorms)
    assert isinstance(optimizer, WholeSumsOptimizer), "its sums are exchanged"
    table = state.tables[stage]

    def work(left_out: torch.Tensor | None, before: BegunStep | None) -> BegunStep:
        with leaving_out(optimizer, left_out):
            sums = optimizer.sums(None if before is None else before.whole)
        return BegunStep(left_out, table.whole(sums, group))

    return begin_step(workspace, instruction, work, first=instruction.part == 0)


PARTS = (HandlerOf(kind="tensor_norms", handler=tensor_norms), StateOf(method=NAME, make=TensorNorms))
