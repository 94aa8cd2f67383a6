"""The plans that cannot run with compiled layers. Imports no torch, so that launchers can ask first."""

from __future__ import annotations

import os
import shutil
import sys

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import PACKING, Plan
from weft.errors import Violation
from weft.program.arrays import Ints
from weft.program.kinds import BACKWARD_INPUT, is_any_of
from weft.program.segments import SEGMENTS

_WHERE = "train.compile"


def compile_problems(plan: Plan, kinds: Ints, graph: LayerGraph) -> list[Violation]:
    """Return one line for each obstacle to compiling the plan's layers; empty if there is none.

    `kinds` are the kinds of the instructions.
    """
    problems = []
    if not graph.is_chain:
        problems.append(Violation(_WHERE, "layers that form a graph are not compiled", "false"))
    if (kinds == BACKWARD_INPUT).any():
        # A compiled layer is one node of the autograd graph: it computes its two gradients together.
        problem = (
            f"schedule {plan.schedule.name!r} splits backward passes, and compiled layers cannot be split"
        )
        problems.append(Violation(_WHERE, problem, 'plan.schedule = "1f1b"'))
    if any(stage.recompute == "selective" for stage in plan.stages):
        problem = "recompute 'selective' chooses among operations, and compiled layers have none of their own"
        problems.append(Violation(_WHERE, problem, 'plan.recompute = "full"'))
    if plan.cp > 1:
        problem = "layers whose tokens several ranks divide among them (cp) are not compiled"
        problems.append(Violation(_WHERE, problem, "plan.cp = 1"))
    if graph.experts:
        problem = "layers whose tokens choose experts are not compiled"
        problems.append(Violation(_WHERE, problem, "false"))
    if plan.method(PACKING) is not None:
        problem = "layers whose attention depends on the documents of a sample are not compiled"
        problems.append(Violation(_WHERE, problem, "task.packing = false"))
    if is_any_of(kinds, SEGMENTS).any():
        problem = "passes in segments (overlapped collectives of tensor ranks) are not compiled"
        problems.append(Violation(_WHERE, problem, "none of them under plan.methods"))
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        problem = f"it needs the C++ compiler {compiler}, which is not installed; CXX can name another one"
        problems.append(Violation(_WHERE, problem, "false"))
    return problems
