"""Packages of others in a folder as an installer leaves it: modules beside the metadata of a distribution."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from weft.bundles import bundles, others, parts, runtime_parts
from weft.installed import entry_points_of_all, installed
from weft.program.passes import ordered_passes

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tests" / "third_party"
_EntryPoints = Mapping[str, Mapping[str, str]]


# What the blocks of Python in the contributing guide are, in their order.
PRINTED = ("last_in_first_out.py", "gradient_average/__init__.py", "gradient_average/runtime.py")


def printed(language: str) -> list[str]:
    """The blocks that the contributing guide prints in a language."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def install_example(folder: Path) -> None:
    """The package of `tests/third_party` with the schedule and the method of the contributing guide."""
    shutil.copytree(SOURCE / "weft_example", folder / "weft_example", dirs_exist_ok=True)
    for name, text in zip(PRINTED, printed("python"), strict=True):
        path = folder / "weft_example" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    own = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups: dict[str, dict[str, str]] = {}
    for project in (own, *(tomllib.loads(text)["project"] for text in printed("toml"))):
        for group, named in project["entry-points"].items():
            groups.setdefault(group, {}).update(named)
    register(folder, own["name"], groups)


def install_method(folder: Path, package: str, method: str, pure: str, runtime: str) -> None:
    """A package with the pure half of a method, and the module `runtime` beside it."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(pure)
    (folder / package / "runtime.py").write_text(runtime)
    register(folder, package.replace("_", "-"), {"weft.methods": {method: f"{package}:BUNDLE"}})


def register(folder: Path, name: str, groups: _EntryPoints) -> None:
    """Write the metadata that `importlib.metadata` reads."""
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        line
        for group, named in groups.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in named.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


@contextmanager
def found(folder: Path) -> Iterator[None]:
    """Have this process find the packages of a folder, and forget them in the end."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    forget_installed()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        forget_installed()
        names = {path.stem for path in folder.iterdir()}
        for module in [one for one in sys.modules if one.partition(".")[0] in names]:
            del sys.modules[module]


def forget_installed() -> None:
    """Have packages looked for again."""
    for known in (entry_points_of_all, installed, others, bundles, parts, runtime_parts, ordered_passes):
        known.cache_clear()
