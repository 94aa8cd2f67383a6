"""Commands about files: `init`, `schema`, `check`."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from weft.cli.output import Json, print_json
from weft.describe.cluster_file import load_cluster
from weft.describe.models import resolve_model
from weft.describe.plan_file import load_plan
from weft.describe.run_file import RunFile, commented_run_file, load_run
from weft.describe.schema import json_schema
from weft.errors import InputError, Violation
from weft.moves.registry import refused_pins
from weft.training.directory.run_directory import RunDirectory
from weft.training.interchange.weight_files import weight_files
from weft.training.session import reopen


def init(path: Path = Path("run.toml"), /) -> None:
    """Write a commented RUN.toml.

    Example: weft init run.toml

    Parameters
    ----------
    path
        The file to write; an existing file is never overwritten.
    """
    if path.exists():
        raise InputError(Violation(str(path), "exists already; give another path"))
    if not path.parent.is_dir():
        raise InputError(Violation(str(path), f"the folder {path.parent} does not exist"))
    path.write_text(commented_run_file())
    print(f"wrote {path}; next: weft plan {path}")


def schema(kind: Literal["run", "cluster", "plan", "summary"], /) -> None:
    """Print the JSON Schema of a kind of file, for editors.

    Example: weft schema run > run.schema.json

    Parameters
    ----------
    kind
        The kind of file: run, cluster, plan or summary.
    """
    print(json.dumps(json_schema(kind), indent=1, sort_keys=True))


def check(*files: Path, json: Json = False) -> int:
    """Verify run files, cluster files, plans and run directories; list all errors at once.

    Example: weft check run.toml cluster.toml runs/demo

    Parameters
    ----------
    files
        RUN.toml (with its initial weights), CLUSTER.toml, PLAN.json files, or run directories (with their
        programs).
    """
    if not files:
        raise InputError("check: no file given")
    found: dict[str, list[str]] = {}
    for path in files:
        try:
            _check_one(path)
            found[str(path)] = []
        except InputError as error:
            found[str(path)] = [str(violation) for violation in error.violations]
    if json:
        print_json(found)
    else:
        for path_name, lines in found.items():
            print("\n".join(lines) if lines else f"{path_name}: good")
    return 2 if any(found.values()) else 0


def _check_one(path: Path) -> None:
    if path.is_dir():
        RunDirectory(path).require()
        _ = reopen(path).program
    elif path.suffix == ".json":
        load_plan(path)
    elif _is_cluster(path):
        load_cluster(path)
    else:
        run = load_run(path)
        if refused := refused_pins(run):
            raise InputError([replace(one, where=f"{path}: {one.where}") for one in refused])
        _check_run(run)


def _check_run(run: RunFile) -> None:
    """Refuse initial weights that training would refuse; without torch, check that their files exist."""
    if not run.model.weights:
        return
    path = Path(run.model.hf or "")
    config = resolve_model(str(path), sequence=run.task.sequence)
    if find_spec("torch") is None:
        weight_files(path if path.is_dir() else path.parent)
        return
    # Imports torch and every family's part of `transformers`, which takes seconds.
    from weft.training.interchange.imports import initial_weights

    initial_weights(path, config)


def _is_cluster(path: Path) -> bool:
    """Return True for a cluster file: it names nodes."""
    try:
        return "[[node]]" in path.read_text(errors="replace")
    except OSError as error:
        raise InputError(Violation(str(path), error.strerror or str(error))) from None


COMMANDS = (init, schema, check)
