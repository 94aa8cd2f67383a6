"""Four sources of text that every machine with Python has, as folders of files.

Python's own modules, its C headers, its language reference as prose, and sums of random numbers.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SOURCES = ("python", "headers", "prose", "sums")
SUMS, SUMS_IN_A_FILE = 60_000, 500


def write_sources(folder: Path) -> dict[str, Path]:
    """Write the sources below the folder, each once, and return their folders by name."""
    for name in SOURCES:
        own = folder / name
        if own.exists():
            continue
        building = folder / f".{name}"
        building.mkdir(parents=True, exist_ok=True)
        for number, text in enumerate(_texts(name)):
            (building / f"{number:05}.txt").write_text(text)
        building.rename(own)
    return {name: folder / name for name in SOURCES}


def _texts(name: str) -> Iterator[str]:
    if name == "python":
        yield from _files(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif name == "headers":
        yield from _files(Path(sysconfig.get_path("include")).rglob("*.h"))
    elif name == "prose":
        from pydoc_data.topics import topics

        yield from topics.values()
    else:
        draw = random.Random(0)
        for _ in range(SUMS // SUMS_IN_A_FILE):
            yield "".join(_sum(draw) for _ in range(SUMS_IN_A_FILE))


def _files(paths: Iterator[Path]) -> Iterator[str]:
    for path in sorted(paths):
        yield path.read_text(encoding="utf-8", errors="replace")


def _sum(draw: random.Random) -> str:
    first, second = draw.randrange(1000), draw.randrange(1000)
    return f"{first} + {second} = {first + second}\n"
