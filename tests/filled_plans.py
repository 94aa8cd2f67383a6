"""Plans with K-FAC, and with its work in the bubbles of their predicted steps. No torch here."""

from __future__ import annotations

from typing import Any

from weft.describe.cluster_expression import cluster_from_expression
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.methods.bubble_filling.decide import decide
from weft.methods.kfac.linears import treated_in, treated_text
from weft.planning.compile import compile_plan
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.predict.simulator import Simulation
from weft.program.program import Program

# Large steps would amplify what rounding differs in.
DAMPING = 1.0


def kfac(model: ModelConfig, every: int = 1, form: str = "inverse") -> Choice:
    linears = treated_text(treated_in(model))
    options = {"damping": DAMPING, "every": every, "linears": linears, "form": form}
    return Choice(name="kfac", options=options)


def fills(placer: str = "weft", **options: Any) -> Choice:
    return Choice(name="bubble-filling", options={"work": "kfac", "placer": placer, **options})


def predicted_step(model: ModelConfig, plan: Plan) -> tuple[Program, Simulation]:
    """The step of a plan on some GPUs, which wait for no host."""
    graph, plan = layer_graph(model), plan.model_copy(update={"launch": "captured"})
    prices = CostModel(graph=graph, cluster=cluster_from_expression(f"{plan.ranks}xv100-16gb"))
    program = compile_plan(plan, graph)
    return program, predict(prices, plan, program).simulation


def placed(model: ModelConfig, plan: Plan) -> Plan:
    """The plan with windows for the bubbles of its step on some GPUs."""
    in_fp32 = plan.model_copy(update={"precision": "fp32"})
    found = decide(in_fp32, layer_graph(model), lambda one: predicted_step(model, one))
    return found.model_copy(update={"precision": plan.precision})
