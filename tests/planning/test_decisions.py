"""A method that looks at the predicted step keeps what it decides in the plan."""

from __future__ import annotations

from pathlib import Path

from installing import register

from weft.describe.run_file import parse_run
from weft.planning.compile import compile_plan
from weft.planning.planned import plan_run

METHOD = """
from weft.bundles import Bundle
from weft.describe.plan import Choice
from weft.describe.run_tables.methods import RunTable
from weft.describe.toml_table import TomlTable
from weft.program.passes import Pass

class Table(TomlTable):
    "Without keys."

def decide(plan, graph, predicted):
    if plan.method("idle") is None:
        return plan
    program, simulation = predicted(plan)
    timeline = simulation.timeline
    assert len(timeline) == len(program)
    end_ns = int(timeline.end_ns.max() - timeline.start_ns.min())
    return plan.model_copy(update={"methods": (Choice(name="idle", options={"step_ns": end_ns}),)})

BUNDLE = Bundle(name="idle", parts=(
    Pass(
        name="idle",
        after=("sharding",),
        options=lambda plan, graph: plan.method("idle"),
        apply=lambda pipeline, layout, choice: pipeline,
        decide=decide,
    ),
    RunTable(method="idle", table=Table, options=lambda table: {}),
))
"""
RUN = {
    "model": {"preset": "gpt-1m"},
    "cluster": {"use": "2xa100-80gb"},
    "plan": {"pp": 2, "schedule": "1f1b"},
}


def test_what_is_decided_from_a_predicted_step_is_part_of_the_plan(packages: Path) -> None:
    (packages / "weft_idle.py").write_text(METHOD)
    register(packages, "weft-idle", {"weft.methods": {"idle": "weft_idle:BUNDLE"}})
    plain, idle = plan_run(parse_run(RUN)), plan_run(parse_run({**RUN, "idle": {}}))
    choice = idle.plan.method("idle")
    assert choice is not None
    assert 0.5 < choice.options["step_ns"] * 1e-9 / idle.prediction.step_s < 2.0
    assert idle.plan.plan_id != plain.plan.plan_id
    # The program follows from the plan alone.
    graph = idle.problem.job.graph
    assert (compile_plan(idle.plan, graph).ids == idle.program.ids).all()
    assert idle.prediction.step_s == plain.prediction.step_s
