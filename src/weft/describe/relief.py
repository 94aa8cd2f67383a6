"""`Relief`: keys of a run file with which a job holds less on its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Relief:
    """A change of the job that a planner does not make by itself; the method contributes it.

    Attributes:
        words: the change and its price in the quality of training, in words.
        keys: the keys to add, by table.
    """

    words: str
    keys: Mapping[str, Mapping[str, Any]]
