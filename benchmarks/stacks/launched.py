"""What a script or a launch line starts: bash runs it, with a stand-in that notes the launcher's words."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

_TIME_LIMIT_S = 60
_MOST_NODES = 64
# What files ask their environment for, since nobody chose it.
CHOSEN = {"DATA_ARGUMENTS": "--mock-data", "DATASET": "c4_test", "TOKENIZER": "./tests/assets/tokenizer"}


def started(script: str, launcher: str, environment: Mapping[str, str]) -> list[str]:
    """The words with which `launcher` is called, the first time that it is.

    Raises:
        ValueError: when the script fails or calls no such program; the text is what bash says.
    """
    with tempfile.TemporaryDirectory() as folder:
        words, program = Path(folder) / "words", Path(folder) / launcher
        program.write_text(f'#!/usr/bin/env bash\nprintf "%s\\0" "$@" > {words}\n')
        program.chmod(0o755)
        given = {**os.environ, **CHOSEN, **environment, "PATH": f"{folder}:{os.environ['PATH']}"}
        run = subprocess.run(
            ["bash", "-c", script], env=given, capture_output=True, text=True, timeout=_TIME_LIMIT_S
        )
        if run.returncode:
            raise ValueError(f"bash ends with {run.returncode}: {run.stderr.strip()}")
        if not words.exists():
            raise ValueError(f"{launcher} is never called")
        return words.read_text().split("\0")[:-1]


def program_of(words: list[str], program: str) -> list[str]:
    """The words after `program` in a launcher's."""
    return words[words.index(program) + 1 :]


def ranks_started(script: str) -> int:
    """How many ranks torchrun starts on all nodes together."""
    first = started(script, "torchrun", {"NODE_RANK": "0", "MASTER_ADDR": "localhost"})
    nodes = int(_value(first, "--nnodes") or 1)
    ranks = 0
    for rank in range(min(nodes, _MOST_NODES)):
        words = started(script, "torchrun", {"NODE_RANK": str(rank), "MASTER_ADDR": "localhost"})
        ranks += int(_value(words, "--nproc-per-node") or 1)
    return ranks


def _value(words: list[str], option: str) -> str | None:
    return words[words.index(option) + 1] if option in words else None
