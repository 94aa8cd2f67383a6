"""Decisions of methods from the predicted step of a plan, kept in the plan.

A program is a pure function of its plan. A pass that fills idle time must know the place of that time. So its
method sees a predicted step once, when the plan is made, and writes its decisions among its options.
"""

from __future__ import annotations

from weft.describe.plan import Plan
from weft.planning.compile import compile_plan
from weft.planning.problem import Problem
from weft.predict.cost.price import price
from weft.predict.predict import predict_priced
from weft.program.passes import ordered_passes


def decided(problem: Problem, plan: Plan) -> Plan:
    """Return the plan after each method in use has seen the predicted step, in the order of the passes.

    Raises:
        InputError: when a method decides for a plan that cannot be compiled.
    """
    graph = problem.job.graph
    for one in ordered_passes():
        if one.decide is not None and one.options(plan, graph) is not None:
            program = compile_plan(plan, graph)
            predicted = predict_priced(program, price(problem.cost_model, program, plan))
            plan = one.decide(plan, program, predicted.simulation.timeline)
    return plan
