"""Tables of methods in a run file: unknown ones are named."""

from __future__ import annotations

import pytest

from weft.describe.run_file import parse_run
from weft.errors import InputError


def test_a_table_of_no_method_is_named_with_the_nearest_one() -> None:
    with pytest.raises(InputError) as refused:
        parse_run({"model": {"preset": "gpt-1m"}, "methods": {"kfca": {}, "lora": {"rank": 0}}})
    unknown, wrong = map(str, refused.value.violations)
    assert unknown.startswith("run: methods.kfca: no method has a table of this name")
    assert unknown.endswith("(nearest valid: kfac)")
    assert "rank" in wrong
