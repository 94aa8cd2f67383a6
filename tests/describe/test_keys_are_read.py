"""Every key that a file may have does something: code that acts on it reads it.

What only shows, checks or translates a key for other programs is no effect, so those rooms do not count.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable

import pytest
from describe.readers import Reads, keys_of, sources, tables_under
from pydantic import create_model

from weft.cli import main
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.cluster_tables import ClusterFile
from weft.describe.device import Device
from weft.describe.run_file import RunFile
from weft.describe.run_tables.planning import GoalTable, PlanTable
from weft.describe.run_tables.training import ReportTable

# One runner reads the package.
pytestmark = pytest.mark.xdist_group("keys")

ACTING = (
    *("describe/plan_subject.py", "describe/request.py", "planning/", "training/", "run/"),
    *("capture/", "moves/", "predict/", "lab/"),
)
# Keys that are known to do nothing yet. Whoever mends one takes it out.
UNREAD: set[str] = set()

RUN_TABLES = tables_under(RunFile)
# Pins are what the table `[plan]` decides.
OWNERS: dict[str, type] = {"run": RunFile, "_report": ReportTable, "pins": PlanTable}
RUN_READS = Reads(RUN_TABLES, owners=OWNERS, makers={"load_run": RunFile, "parse_run": RunFile})
CLUSTER_TABLES = tables_under(ClusterFile)
CLUSTER_READS = Reads(CLUSTER_TABLES, owners={}, makers={"model_validate": ClusterFile})
PARTS = tables_under(Cluster)
PART_READS = Reads(
    PARTS,
    owners={"cluster": Cluster, "device": Device, "link": Link},
    makers={"device_of": Device, "group_of": NodeGroup, "link_between": Link},
)


def shown(keys: set[tuple[type, str]]) -> set[str]:
    return {f"{table.__name__}.{name}" for table, name in keys}


def unread(reads: Reads, modules: dict[str, str]) -> set[str]:
    return shown(keys_of(reads.tables) - reads.of(modules))


def test_every_key_of_a_run_file_is_read():
    assert len(keys_of(RUN_TABLES)) > 45
    assert unread(RUN_READS, sources(under=ACTING)) == UNREAD


def test_every_key_of_a_cluster_file_reaches_the_cluster():
    assert len(CLUSTER_TABLES) == 4
    assert unread(CLUSTER_READS, sources(under=("describe/cluster_file.py",))) == set()


def test_everything_that_a_cluster_says_is_read():
    assert {part.__name__ for part in PARTS} == {"Cluster", "NodeGroup", "Device", "Link"}
    assert unread(PART_READS, sources(under=ACTING)) == set()


@pytest.mark.parametrize(
    ("reads", "path", "reader", "instead", "found"),
    [
        (RUN_READS, "planning/planned.py", "run.goal.deadline_hours", "hours", "GoalTable.deadline_hours"),
        # A plan has no planner: that is another plan.
        (RUN_READS, "planning/planned.py", "run.plan.planner", "plan.planner", "PlanTable.planner"),
        (
            RUN_READS,
            "describe/request.py",
            "run.sync.choice",
            "None",
            "SyncTable.options",
        ),
        (RUN_READS, "training/loop.py", "run.job.run.checkpoint.keep", "2", "CheckpointTable.keep"),
        (RUN_READS, "training/optimizer/optimizers.py", "table.betas", "None", "OptimizerTable.betas"),
        (CLUSTER_READS, "describe/cluster_file.py", "table.launch", "None", "DeviceTable.launch"),
        (PART_READS, "planning/goals.py", "group.device.price_per_hour", "price", "Device.price_per_hour"),
    ],
)
def test_a_key_whose_reader_is_gone_is_found(reads, path, reader, instead, found):
    modules = sources(under=(*ACTING, "describe/cluster_file.py"))
    before = unread(reads, modules)
    assert reader in modules[path]
    modules[path] = modules[path].replace(reader, instead)
    assert ", ".join(sorted(unread(reads, modules) - before)) == found


def test_a_new_key_that_nobody_reads_is_found():
    wider = create_model("GoalTable", __base__=GoalTable, made_up=(int, 1))
    run_file = create_model("RunFile", __base__=RunFile, goal=(wider, wider()))
    makers = dict.fromkeys(RUN_READS.makers, run_file)
    reads = Reads(tables_under(run_file), owners={**OWNERS, "run": run_file}, makers=makers)
    assert unread(reads, sources(under=ACTING)) == UNREAD | {"GoalTable.made_up"}


# What only refuses an option beside others: reading it there is no use of it.
REFUSALS = ("only_", "never_")


def unused_options(function: Callable[..., object], text: str) -> set[str]:
    """Options of a command that its body does not read, but to refuse them."""
    (body,) = ast.parse(text).body
    refusing = {
        id(word)
        for node in ast.walk(body)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.startswith(REFUSALS)
        for word in ast.walk(node.value)
    }
    read = {
        node.id
        for node in ast.walk(body)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in refusing
    }
    return set(inspect.signature(function).parameters) - read


COMMANDS = {
    name: getattr(importlib.import_module(f"weft.cli.{module}"), name)
    for module, names in main.COMMANDS.items()
    for name in names
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_of_a_command_is_used(name):
    command = COMMANDS[name]
    assert unused_options(command, inspect.getsource(command)) == set()


def test_an_option_that_is_only_refused_is_found():
    text = inspect.getsource(COMMANDS["plan"])
    assert "critical_batch=critical_batch, " in text
    without = text.replace("critical_batch=critical_batch, ", "")
    assert unused_options(COMMANDS["plan"], without) == {"critical_batch"}


def test_the_functions_that_commands_call_use_all_they_are_given():
    """An option could still be lost one call further down."""
    lost = {
        f"{path}:{node.name}: {sorted(unused)}"
        for path, text in sources(under=("cli/", "api.py")).items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and (unused := unused_arguments(node))
    }
    assert lost == set()


def unused_arguments(function: ast.FunctionDef) -> set[str]:
    given = function.args
    names = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}
    return names - {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
