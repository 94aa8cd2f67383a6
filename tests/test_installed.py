"""What other packages add is found by their metadata, and what cannot be imported is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from installing import register

from weft.errors import InputError
from weft.installed import installed


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
