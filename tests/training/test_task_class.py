"""The class of a user's own task is found by its name, or refused in one line."""

from __future__ import annotations

import pytest

from weft.errors import InputError
from weft.training.task_class import task_class


class Whole:
    def batch(self) -> None: ...

    def loss(self) -> None: ...


def test_the_class_of_a_name_is_found() -> None:
    assert task_class(f"{__name__}:Whole") is Whole


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (f"{__name__}:Absent", "cannot be imported: module .* has no attribute 'Absent'$"),
        ("no_such_module:Task", "cannot be imported: No module named 'no_such_module' in this folder or"),
        ("pathlib:Path", "'pathlib:Path' is no task: it has no batch and no loss$"),
    ],
)
def test_what_is_no_task_is_refused(kind: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        task_class(kind)
