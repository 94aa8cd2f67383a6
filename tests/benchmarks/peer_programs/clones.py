"""Clones of the peers' own repositories, where the environment names them: WEFT_CALCULON, WEFT_METIS."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.peer_programs.program import PeerProgram

SOURCES = {
    "calculon": "https://github.com/calculon-ai/calculon",
    "metis": "https://github.com/SamsungLabs/Metis",
}


def program(name: str) -> PeerProgram:
    """The peer's program; the test is skipped where there is none."""
    variable = f"WEFT_{name.upper()}"
    root = os.environ.get(variable)
    if root is None:
        pytest.skip(f"{variable} names no clone of {SOURCES[name]}")
    return PeerProgram(name=name, root=Path(root), python=os.environ.get("WEFT_PEER_PYTHON"))
