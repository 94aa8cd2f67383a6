"""Optimizers by name: what is counted of weft's own and of other packages', and what is refused."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from weft.describe import optimizers
from weft.describe.optimizers import (
    ADAMW,
    GROUP,
    KNOWN_OPTIMIZERS,
    MOMENTUM_SGD,
    PLAIN_SGD,
    OptimizerWork,
    counted_work,
    own_optimizer,
)
from weft.describe.run_file import parse_run
from weft.errors import InputError

MODEL = {"model": {"preset": "gpt-1m"}}


def test_states_are_those_of_the_algorithms() -> None:
    assert counted_work("adamw").work == counted_work("adam").work == ADAMW
    assert counted_work("sgd").work == counted_work("sgd", momentum=0.5).work == MOMENTUM_SGD
    assert counted_work("sgd", momentum=0.0).work == PLAIN_SGD
    assert [work.kept_bytes(4) for work in (PLAIN_SGD, MOMENTUM_SGD, ADAMW)] == [0, 4, 8]
    assert [work.touched_bytes(8) for work in (PLAIN_SGD, MOMENTUM_SGD, ADAMW)] == [0, 16, 32]


def test_bytes_besides_do_not_depend_on_the_precision() -> None:
    work = OptimizerWork(states=1, state_bytes=3)
    assert (work.kept_bytes(4), work.kept_bytes(8), work.touched_bytes(4)) == (7, 11, 14)
    assert work.model_copy(update={"moved_bytes": 5}).touched_bytes(4) == 5


def test_another_package_says_what_its_optimizer_keeps() -> None:
    declared = OptimizerWork(states=1, elementwise=True)
    for name in ("own_optimizers:SignMomentum", "own_optimizers:momentum_sgd"):
        assert counted_work(name) == (declared, "")


def test_the_key_counts_for_who_says_nothing_and_nothing_is_imported() -> None:
    assert counted_work("nowhere.at.all:Optimizer", state_bytes=2) == (OptimizerWork(state_bytes=2), "")


def test_silence_is_taken_for_adamw_aloud() -> None:
    work, assumed = counted_work("own_optimizers:Silent")
    assert (work.states, work.elementwise) == (2, False)
    assert assumed == (
        "AdamW's two states per parameter, because own_optimizers:Silent does not say what it keeps; "
        "its attribute weft_work or the key optimizer.state_bytes says it"
    )


def test_a_package_registers_its_optimizer_under_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint(name="sign-momentum", value="own_optimizers:SignMomentum", group=GROUP)
    monkeypatch.setattr(optimizers, "entry_points", lambda group: [entry] if group == GROUP else [])
    run = parse_run({**MODEL, "optimizer": {"name": "sign-momentum"}})
    assert counted_work(run.optimizer.name).work.states == 1
    with pytest.raises(InputError, match="nearest valid: sign-momentum"):
        parse_run({**MODEL, "optimizer": {"name": "sign-momentun"}})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_optimizers:Nothing", "'own_optimizers:Nothing' cannot be imported"),
        ("nowhere.at.all:Optimizer", "'nowhere.at.all:Optimizer' cannot be imported"),
        ("own_models:NOT_A_FUNCTION", "'own_models:NOT_A_FUNCTION' is int, which makes no optimizer"),
    ],
)
def test_what_cannot_be_had_is_refused(name: str, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        own_optimizer(name)
    assert str(refusal.value).startswith(f"optimizer.name: {words}")


def test_what_makes_no_sense_is_refused_key_by_key() -> None:
    with pytest.raises(InputError) as refusal:
        counted_work("own_optimizers:Garbled")
    lines = str(refusal.value).splitlines()
    assert all(line.startswith("optimizer.name: weft_work of own_optimizers:Garbled") for line in lines)
    assert any("states: -1" in line for line in lines)
    assert any("stats" in line and "nearest valid: states" in line for line in lines)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"name": "adamv"},
            "name: 'adamv' is neither adamw, adam, sgd, lamb, nvlamb, lans, muon nor of the form "
            "package.module:Optimizer (nearest valid: adam)",
        ),
        (
            {"name": "sgd", "matrix_scale": "original"},
            'matrix_scale: has no effect with name = "sgd"; leave it out',
        ),
        ({"state_bytes": 4}, 'state_bytes: has no effect with name = "adamw"; leave it out'),
        ({"name": "a:B", "betas": [0.5, 0.5]}, 'betas: has no effect with name = "a:B"; leave it out'),
        ({"name": "a:B", "momentum": 0.5}, 'momentum: has no effect with name = "a:B"; leave it out'),
    ],
)
def test_a_run_file_names_an_optimizer(table: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        parse_run({**MODEL, "optimizer": table})
    assert str(refusal.value) == f"run: optimizer{'.' if 'name:' in message[:5] else ': '}{message}"


def test_every_optimizer_that_weft_makes_is_known() -> None:
    made = pytest.importorskip("weft.training.optimizer.optimizers").OPTIMIZERS
    assert set(made) == set(KNOWN_OPTIMIZERS)
