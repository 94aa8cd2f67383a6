"""The modules of an example, whose names other examples may have, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def importable_from(folder: Path) -> Iterator[None]:
    """Import from the folder of an example; what others have imported under its names comes back."""
    names = [path.stem for path in folder.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)
