"""What other packages add is found by their metadata, and what cannot be imported is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from installing import register

from weft.describe.families.own import own_model
from weft.errors import InputError
from weft.installed import imported, installed


def test_nothing_is_found_where_nothing_is_installed(packages: Path) -> None:
    assert [entry.name for entry in installed("weft.schedules")] == []


def test_what_a_distribution_names_is_imported(packages: Path) -> None:
    (packages / "weft_other.py").write_text("VALUE = 3\n")
    register(packages, "weft-other", {"weft.things": {"three": "weft_other:VALUE"}})
    assert installed("weft.things") == (("three", 3),)


@pytest.mark.parametrize("named", ["weft_absent:VALUE", "weft_other:OTHER"])
def test_what_cannot_be_imported_is_refused_in_one_line(packages: Path, named: str) -> None:
    (packages / "weft_other.py").write_text("VALUE = 3\n")
    register(packages, "weft-other", {"weft.things": {"three": named}})
    with pytest.raises(InputError, match=f"^entry point weft.things: three = '{named}': .+$"):
        installed("weft.things")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("made = 1\nmade / 0", "ZeroDivisionError: division by zero (broken_code.py, line 2)"),
        ("import absent", "ModuleNotFoundError: No module named 'absent' (broken_code.py, line 1)"),
        ("def made(:", "invalid syntax (broken_code.py, line 1)"),
        ("", "module 'broken_code' has no attribute 'made'"),
    ],
)
def test_a_mistake_in_the_code_of_a_user_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    (tmp_path / "broken_code.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_code", raising=False)
    with pytest.raises(InputError) as refused:
        imported("model.build", "broken_code:made")
    (violation,) = refused.value.violations
    assert violation.where == "model.build"
    assert violation.problem == f"'broken_code:made' cannot be imported: {expected}"


def test_a_function_that_fails_is_told_with_the_line_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_code.py").write_text("def build():\n    return missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as refused:
        own_model("failing_code:build")
    assert "fails: NameError: name 'missing' is not defined (failing_code.py, line 2)" in str(refused.value)


def test_a_module_that_trains_when_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unguarded.py").write_text('import weft\nweft.plan(model="gpt-1m")\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match=r"weft.plan: is called while weft imports 'unguarded:made'.*__main__"
    ):
        imported("model.build", "unguarded:made")
