"""Methods are found by folder and by entry point, and their order is what their passes declare."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from installing import install_method, register
from small_plans import make_plan, tiny

import weft
from weft.bundles import Bundle, bundles, parts
from weft.describe.families import layer_graph
from weft.describe.plan import Choice
from weft.errors import InputError
from weft.moves.move import Move
from weft.planning.compile import compile_plan
from weft.program.passes import Pass, ordered_passes

ROOT = Path(weft.__file__).parent


def test_a_folder_is_a_method() -> None:
    folders = {path.name for path in (ROOT / "methods").iterdir() if (path / "__init__.py").exists()}
    assert {name.replace("-", "_") for name in bundles()} == folders
    assert folders == {
        "attention_window",
        "auxiliary_head",
        "blocking",
        "bubble_filling",
        "clan",
        "cser",
        "diloco",
        "evaluate",
        "expert_balance",
        "expert_exchanges",
        "expert_parallel",
        "fp8_linears",
        "gradient_norm",
        "hierarchical",
        "kfac",
        "local_averaging",
        "lora",
        "loss_kernels",
        "micro_batch_clipping",
        "micro_batch_norms",
        "offload",
        "packing",
        "power_sgd",
        "recomputation",
        "sdp4bit",
        "sharding",
        "sign_momentum",
        "slow_momentum",
        "snapshot",
        "tensor_collectives",
        "tensor_norms",
        "tying",
        "whole_matrices",
    }


def test_passes_come_in_the_order_that_they_declare() -> None:
    assert [one.name for one in ordered_passes()] == [
        "sharding",
        "sdp4bit",
        "tying",
        "blocking",
        "clan",
        "gradient-norm",
        "kfac",
        "micro-batch-clipping",
        "auxiliary-head",
        "bubble-filling",
        "cser",
        "evaluate",
        "expert-balance",
        "local-averaging",
        "micro-batch-norms",
        "snapshot",
        "expert-exchanges",
        "tensor-collectives",
        "offload",
        "tensor-norms",
        "whole-matrices",
    ]
    assert {one.name for one in parts(Pass)} <= set(bundles())


def test_every_contribution_has_a_room_that_takes_it() -> None:
    """A part of a type that nobody asks for would have no effect."""
    asked = {
        node.args[0].id
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("parts", "runtime_parts")
        and isinstance(node.args[0], ast.Name)
    }
    given = {type(part) for bundle in bundles().values() for part in bundle.parts}
    assert [kind for kind in given if not asked & {base.__name__ for base in kind.__mro__}] == []
    assert {"Pass", "CostOf", "ResidentBytes", "Move", "HandlerOf", "StateOf", "RunTable"} <= asked


def test_methods_of_others_join_those_of_weft(weft_example: Path) -> None:
    assert "gradient-average" in bundles()
    assert "keep the average gradient" in {move.name for move in parts(Move)}
    assert next(iter(ordered_passes())).name == "sharding"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("BUNDLE = 3", "3 is a int, not a Bundle"),
        (
            "from weft.bundles import Bundle\nBUNDLE = Bundle(name='sharding')",
            "two methods are called 'sharding'",
        ),
    ],
)
def test_what_is_no_method_is_refused_in_one_line(packages: Path, text: str, problem: str) -> None:
    (packages / "weft_other.py").write_text(text + "\n")
    register(packages, "weft-other", {"weft.methods": {"other": "weft_other:BUNDLE"}})
    with pytest.raises(InputError, match=problem):
        bundles()


@pytest.mark.parametrize(
    ("parts", "problem"),
    [("Bundle", "parts: is type, no tuple"), ("(Bundle,)", "parts: Bundle is a class; a part is an object")],
)
def test_parts_that_would_have_no_effect_are_refused(packages: Path, parts: str, problem: str) -> None:
    pure = f"from weft.bundles import Bundle\nBUNDLE = Bundle(name='other', parts={parts})\n"
    install_method(packages, "weft_other", "other", pure, "")
    with pytest.raises(InputError, match=f"^method other: {problem}"):
        bundles()


def test_a_method_that_declares_no_obligations_has_its_state_at_run_time(weft_example: Path) -> None:
    """States are made for programs with obligations to their method."""
    config = tiny()
    plan = make_plan(config).model_copy(
        update={"methods": (Choice(name="gradient-average", options={"decay": 0.5}),)}
    )
    assert "gradient-average" in compile_plan(plan, layer_graph(config)).obligations.methods
    assert "gradient-average" not in compile_plan(make_plan(config), layer_graph(config)).obligations.methods


def test_passes_that_wait_for_each_other_are_refused(packages: Path) -> None:
    (packages / "weft_other.py").write_text(
        "from weft.bundles import Bundle\n"
        "from weft.program.passes import Pass\n"
        "def one(name, after):\n"
        "    return Pass(name=name, after=(after,), options=lambda plan, graph: None, apply=None)\n"
        "BUNDLE = Bundle(name='other', parts=(one('first', 'second'), one('second', 'first')))\n"
    )
    register(packages, "weft-other", {"weft.methods": {"other": "weft_other:BUNDLE"}})
    with pytest.raises(InputError, match="the passes of first and second wait for each other"):
        ordered_passes()


def test_a_bundle_is_data() -> None:
    assert Bundle(name="empty").parts == ()
