"""PartialLayout against the goal's contract: what keeps less is refused with the contract that admits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from weft.describe.contract import Contract
from weft.describe.run_file import RunFile, parse_run
from weft.describe.run_tables.planning import GoalTable
from weft.moves.move import Purpose
from weft.moves.registry import all_moves, kept_out, moves_for, refused_pins


def run(contract: str = "exact", **tables: dict[str, Any]) -> RunFile:
    return parse_run({"model": {"preset": "gpt-1m"}, "goal": {"contract": contract}, **tables})


def lines(given: RunFile) -> list[str]:
    return [str(one) for one in refused_pins(given)]


def test_the_words_of_run_files_are_those_of_contracts() -> None:
    words = get_args(GoalTable.model_fields["contract"].annotation)
    assert [Contract.of(word).word for word in words] == list(words)
    assert [Contract.of(word) for word in words] == sorted(Contract)


@pytest.mark.parametrize("contract", [one.word for one in Contract])
def test_exact_pins_are_within_every_contract(contract: str) -> None:
    pins = {"schedule": "gpipe", "sharding": "zero-2", "recompute": "full"}
    assert lines(run(contract, plan=pins, sync={"method": "dense"}, optimizer={"clip_norm": 1.0})) == []


@pytest.mark.parametrize(
    ("tables", "admitted", "said"),
    [
        ({"plan": {"schedule": "in-twos"}}, "unbiased", "plan.schedule 'in-twos', which is unbiased"),
        ({"sync": {"method": "rounded"}}, "empirical", "sync.method 'rounded', which is empirical"),
    ],
)
def test_a_pin_that_keeps_less_names_the_contract_that_admits_it(
    weft_example: Path, tables: dict[str, Any], admitted: str, said: str
) -> None:
    for contract in Contract:
        expected = f"goal.contract: {contract.word!r} keeps out {said} (nearest valid: {admitted})"
        refused = contract < Contract.of(admitted)
        assert lines(run(contract.word, **tables)) == ([expected] if refused else [])


def test_all_pins_are_answered_for_at_once(weft_example: Path) -> None:
    both = run(plan={"schedule": "in-twos"}, sync={"method": "rounded"})
    assert len(lines(both)) == 2


def test_a_method_that_no_move_knows_is_refused_with_the_nearest() -> None:
    assert lines(run(sync={"method": "dens"})) == [
        "sync.method: 'dens' is not one of auto, clan, cser, dense, diloco, hierarchical, local-averaging, "
        "power-sgd, sdp4bit, sign-momentum, slow-momentum "
        "(nearest valid: dense)"
    ]


def test_a_looser_contract_keeps_fewer_moves_out(weft_example: Path) -> None:
    names = [[move.name for move in kept_out(contract)] for contract in Contract]
    unbiased = ["schedule in-twos", "five times the micro-batch"]
    empirical = ["sync rounded", "sync rounded-to"]
    assert names == [[*unbiased, *empirical], [*unbiased, *empirical], empirical, []]
    assert set(names[0]) < set(all_moves())


def test_nothing_of_weft_itself_is_kept_out() -> None:
    assert kept_out(Contract.EXACT) == ()


def test_every_move_is_tried_once_and_those_of_others_first(weft_example: Path) -> None:
    for purpose in Purpose:
        names = [move.name for move in moves_for(purpose, Contract.EMPIRICAL)]
        assert len(names) == len(set(names))
        assert set(names) == {name for name, move in all_moves().items() if purpose in move.purposes}
    first = moves_for(Purpose.FASTER, Contract.EXACT)[0]
    assert first.name == "three times the micro-batch"
