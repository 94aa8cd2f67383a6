"""Programs whose passes a method cuts into segments: their prediction, and how to break them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from program.mutations import swap, twice, with_value, without_row
from small_plans import make_program

import weft
from weft.describe.cluster import Cluster
from weft.describe.cluster_file import cluster_of
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.planning.decisions import decided_words
from weft.planning.report_sections import sections_of
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import PredictedStep, predict
from weft.program.program import Program


def cut_by(plan: Plan, *, name: str, way: str) -> Plan:
    """The plan with a method's exchanges run in this way."""
    return plan.model_copy(update={"methods": (*plan.methods, Choice(name=name, options={"run": way}))})


def run_file(folder: Path, way: str, *, name: str, preset: str, global_batch: int, **keys: str | int) -> Path:
    """A run file that asks for a method's exchanges in this way, and pins these keys of the plan."""
    tables = [
        f'[model]\npreset = "{preset}"',
        f"[train]\nglobal_batch = {global_batch}\nsteps = 1",
        '[cluster]\nuse = "4xa100-80gb"',
        "[plan]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items()),
        f'[{name}]\nrun = "{way}"\n',
    ]
    path = folder / "run.toml"
    path.write_text("\n".join(tables))
    return path


def require_told(path: Path, name: str, way: str, kinds: Sequence[int]) -> None:
    """Require that a run file's plan has a method's exchanges run in this way, and that reports say so."""
    planned = weft.plan(path)
    choice = planned.plan.method(name)
    assert (choice.options if choice is not None else {"run": "inside"}) == {"run": way}
    columns = planned.job.program.columns
    exchanges = (columns.rank == 0) & np.isin(columns.kind, kinds)
    told = [dict(one.rows) for one in sections_of(planned.job, []) if one.name == name]
    assert exchanges.any() == bool(told) == (way != "inside")
    words = [one for one in decided_words(planned.job) if one.startswith(name.replace("-", " "))]
    assert words == ([] if way == "inside" else [f"{name.replace('-', ' ')}: {way}"])
    for rows in told:
        assert rows[f"how {name.replace('-', ' ')} run"] == way
        assert rows["in a step on rank 0"] == str(exchanges.sum())


def cluster(latency_us: int, *, synchronous: bool = True, nodes: int = 1) -> Cluster:
    between = {"between": ["host", "host"], "bandwidth": "1 GB/s", "latency": f"{latency_us} us"}
    record = {
        "name": "cores",
        "node": [
            {
                "name": "host",
                "count": nodes,
                "device": "core",
                "devices": 48 // nodes,
                "bandwidth": "1 GB/s",
                "latency": f"{latency_us} us",
            }
        ],
        "device": {
            "core": {
                "memory": "4 GiB",
                "memory_bandwidth": "10 GB/s",
                "synchronous": synchronous,
                "flops": {"fp64": 1e10},
            }
        },
    }
    return cluster_of({**record, "link": [between]} if nodes > 1 else record, "cores")


def predicted(config: ModelConfig, plan: Plan, on: Cluster) -> PredictedStep:
    return predict(CostModel(graph=layer_graph(config), cluster=on), plan, make_program(config, plan))


def collective(program: Program, kind: int) -> int:
    """The second row of a kind."""
    return int(np.flatnonzero(program.columns.kind == kind)[1])


def broken_borders(kind: int, axis: str) -> list[tuple[Callable[[Program], Program], str]]:
    """Changes of a program with two replicas at collectives of this kind, and what is said of each."""

    def other_group(program: Program) -> Program:
        row = collective(program, kind)
        own = program.columns.group[row]
        other = next(number for number in range(len(program.groups)) if number != own)
        return with_value(program, "group", row, other)

    def other_order(program: Program) -> Program:
        """The ranks of a group in another order than that of their shares."""
        group = int(program.columns.group[collective(program, kind)])
        groups = list(program.groups)
        groups[group] = groups[group][::-1]
        return replace(program, groups=tuple(groups))

    def overtaking(program: Program) -> Program:
        """One rank comes to two collectives in another order than the others."""
        columns = program.columns
        rows = np.flatnonzero((columns.kind == kind) & (columns.rank == 0))
        return swap(program, int(rows[0]), int(rows[1]))

    def other_size(program: Program) -> Program:
        columns = program.columns
        size = int(columns.bytes[collective(program, kind)])
        grown = np.where(columns.kind == kind, size - 8, columns.bytes)
        return replace(program, columns=replace(columns, bytes=grown))

    def little_room(program: Program) -> Program:
        row = collective(program, kind)
        return with_value(program, "most_bytes", row, int(program.columns.bytes[row]) - 1)

    return [
        (lambda program: twice(program, collective(program, kind)), "have the same id"),
        (lambda program: without_row(program, collective(program, kind)), "'segment_input'"),
        (other_group, f"is not with the {axis} ranks of its replica"),
        (other_order, f"is not with the {axis} ranks of its replica, in their order"),
        (overtaking, "wait for each other"),
        (other_size, "bytes, its border another amount"),
        (little_room, "has room for"),
    ]
