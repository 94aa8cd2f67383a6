"""The tests that a change touches: its own, its mirrors, and those of its importers, in this order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from touched import changed, imported, module_of, nearest_first

FILES = {
    "src/weft/describe/plan.py": "import json",
    "src/weft/planning/search.py": "from weft.describe.plan import Plan",
    "src/weft/cli/main.py": "import weft.planning.search",
    "tests/small_plans.py": "from weft.describe import plan",
    "tests/describe/test_plan.py": "import pytest",
    "tests/describe/test_plan_file.py": "from weft.describe.plan import Plan",
    "tests/program/test_build.py": "from small_plans import tiny",
    "tests/planning/test_search.py": "from weft.planning.search import search",
    "tests/cli/test_main.py": "from weft.cli.main import run",
    "tests/cli/test_help.py": "import weft.errors",
}


def touched_by(*paths: str) -> list[str]:
    imports = {Path(name): set(imported(text)) for name, text in FILES.items()}
    return [str(path) for path in nearest_first(map(Path, paths), imports)]


def test_mirrors_come_first_then_importers_then_tests_of_importers() -> None:
    near, importer, *last = touched_by("src/weft/describe/plan.py")
    assert (near, importer) == ("tests/describe/test_plan.py", "tests/describe/test_plan_file.py")
    assert last == ["tests/planning/test_search.py", "tests/program/test_build.py"]


def test_a_changed_test_touches_itself_and_a_changed_helper_its_users() -> None:
    assert touched_by("tests/cli/test_help.py") == ["tests/cli/test_help.py"]
    assert touched_by("tests/small_plans.py") == ["tests/program/test_build.py"]
    assert touched_by("setup.py") == []


def test_names_are_those_that_others_import() -> None:
    assert module_of(Path("src/weft/describe/__init__.py")) == "weft.describe"
    assert module_of(Path("tests/methods/rows/sharding.py")) == "methods.rows.sharding"


def git(folder: Path, *words: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


def test_changes_are_those_of_the_files_or_else_of_the_last_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-b", "main")
    for name in ("first", "second", "third"):
        (tmp_path / f"{name}.py").write_text("")
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "-m", name)
    assert changed(None, tmp_path) == {Path("third.py")}
    assert changed("main~2", tmp_path) == {Path("second.py"), Path("third.py")}
    (tmp_path / "new.py").write_text("")
    (tmp_path / "first.py").unlink()
    assert changed(None, tmp_path) == {Path("new.py")}
    with pytest.raises(SystemExit, match="nowhere"):
        changed("nowhere", tmp_path)
