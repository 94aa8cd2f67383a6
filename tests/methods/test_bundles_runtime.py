"""Contributions to the runtime by methods of other packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from installing import install_method

from weft.bundles import runtime_parts
from weft.errors import InputError
from weft.program.passes import Pass


@pytest.mark.parametrize(
    ("runtime", "problem"),
    [
        ("", "'weft_other.runtime:PARTS' cannot be imported: .* has no attribute 'PARTS'$"),
        ("import absent", "'weft_other.runtime:PARTS' cannot be imported: .*'absent'"),
        ("PARTS = 3", "is int, no tuple of parts$"),
    ],
)
def test_a_runtime_without_parts_is_refused_in_one_line(packages: Path, runtime: str, problem: str) -> None:
    pure = "from weft.bundles import Bundle\nBUNDLE = Bundle(name='other', runtime='weft_other.runtime')\n"
    install_method(packages, "weft_other", "other", pure, runtime)
    with pytest.raises(InputError, match=f"^method other: runtime: {problem}"):
        runtime_parts(Pass)
