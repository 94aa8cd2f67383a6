"""A driver's tool that answers as a script says, first on the path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def nvidia_smi_of(script: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Put an `nvidia-smi` that runs a shell script into a folder, and the folder first on the path."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
