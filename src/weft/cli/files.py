"""Commands about files: `init`, `schema`, `check`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from pydantic import BaseModel, ConfigDict, Field

from weft.cli.cluster_files import write_cluster
from weft.cli.output import Flag, Json, print_json, print_warnings
from weft.cli.rankings import planned_visibly
from weft.describe.cluster_file import load_cluster
from weft.describe.cluster_tables import ClusterFile
from weft.describe.plan_file import PlanKeys
from weft.describe.reading import holds_json
from weft.describe.run_file import RunFile, commented_run_file
from weft.describe.run_tables.methods import run_tables
from weft.destinations import require_new
from weft.errors import InputError, Violation, require_choice
from weft.planning.planned_job import PlannedJob
from weft.run.supported import planned_only
from weft.training.refusals import checkpoint_problems, refusals
from weft.training.session import job_in

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Summary(BaseModel):
    """The content of `summary.json` in a run directory."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: str = Field(description="path of the plan, relative to the run directory")
    plan_id: str
    world_size: Count
    steps: Count
    predicted_step_s: Positive
    predicted_step_low_s: Positive
    predicted_step_high_s: Positive
    predicted_peak_bytes: tuple[int, ...] = Field(description="of each rank")
    measured_step_s: Positive = Field(
        description="median after 5 warm-up steps; of a shorter run, the last step"
    )
    first_loss: float = Field(description="before the first step, per target on held-out samples")
    final_loss: float = Field(description="after the last step, per target on held-out samples")
    final_metrics: dict[str, float] = Field(
        default_factory=dict, description="means over held-out samples after the last step, such as accuracy"
    )
    by_source: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="of data with several sources, by source: loss, perplexity, and what methods saw",
    )
    tokens_per_s: Positive
    max_rss_bytes: tuple[int, ...] = Field(description="largest resident memory of each rank")
    library_bytes: tuple[int, ...] = Field(
        default=(), description="of it, interpreter and libraries, which no prediction has; of each rank"
    )
    tensor_bytes: tuple[int, ...] = Field(
        default=(), description="of it, the largest rest before the first checkpoint; of each rank"
    )
    max_device_bytes: tuple[int, ...] = Field(
        default=(), description="most bytes held on the accelerator of each rank; empty on CPUs"
    )
    checkpoints: Annotated[int, Field(ge=0)] = Field(
        default=0, description="completed, by all starts of the run"
    )
    checkpoint_bytes: float = Field(default=0, description="of the last one")
    checkpoint_stall_s: float = Field(default=0.0, description="how long training stood still for them")
    checkpoint_write_s: float = Field(
        default=0.0, description="how long they were written while training went on"
    )
    data_read_bytes: float | None = Field(
        default=None,
        description="samples that this start has read, each once per node; absent in older results",
    )
    weight_log_step_bytes: float | None = Field(
        default=None, description="of all ranks' logs of weights in a step; absent without `weight_log`"
    )


_DRAFT = "https://json-schema.org/draft/2020-12/schema"

SCHEMAS: Mapping[str, type[BaseModel]] = {
    "run": RunFile,
    "cluster": ClusterFile,
    "plan": PlanKeys,
    "summary": Summary,
}


def json_schema(kind: str) -> dict[str, Any]:
    """Return the schema of one kind of file: ``run``, ``cluster``, ``plan`` or ``summary``.

    Raises:
        InputError: for any other kind.
    """
    require_choice("schema", kind, SCHEMAS)
    schema = {"$schema": _DRAFT, **SCHEMAS[kind].model_json_schema()}
    if kind == "run":
        for name, one in run_tables().items():
            table = one.table.model_json_schema()
            schema["$defs"] |= table.pop("$defs", {})
            schema["properties"][name] = table
    if kind == "plan":
        # For people and tools; the reader computes the id from the decisions.
        schema["properties"] = {
            "plan_id": {"type": "string", "description": "hash of the decisions; ignored when read"},
            **schema["properties"],
        }
    return schema


def init(
    path: Path | None = None,
    /,
    *,
    cluster: Flag = False,
    nodes: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    topology: Path | None = None,
    ports: Path | None = None,
    device: str | None = None,
) -> None:
    """Write a commented RUN.toml, or with --cluster a CLUSTER.toml.

    - `weft init run.toml`
    - `scontrol show nodes | weft init cluster.toml --cluster --nodes -`

    Parameters
    ----------
    path
        The file to write: run.toml, or cluster.toml with --cluster. An existing file is never overwritten.
    cluster
        Describe the cluster: this machine's devices and links, or those of --nodes.
    nodes
        A scheduler's list; - is standard input. From scontrol show nodes, with or without --json. Or from
        sinfo --json, kubectl get nodes -o json, or slurm.conf.
    topology
        What nvidia-smi topo -m prints on a node; default: on this machine, if it has the nodes' devices.
    ports
        What ibstat or ibstatus prints on a node; default: this machine's ports, as above.
    device
        The devices of nodes whose list does not say them exactly, such as a100-80gb.
    """
    path = path or Path("cluster.toml" if cluster else "run.toml")
    require_new(path)
    if cluster:
        write_cluster(path, nodes=nodes, topology=topology, ports=ports, device=device)
        return
    given = {"--nodes": nodes, "--topology": topology, "--ports": ports, "--device": device}
    if idle := [option for option, value in given.items() if value is not None]:
        raise InputError([Violation(option, "is about a cluster", "--cluster") for option in idle])
    path.write_text(commented_run_file())
    print(f"wrote {path}; next: weft plan {path}")


def schema(kind: Literal["run", "cluster", "plan", "summary"], /) -> None:
    """Print the JSON Schema of a kind of file, for editors.

    - `weft schema run > run.schema.json`

    Parameters
    ----------
    kind
        The kind of file: run, cluster, plan or summary.
    """
    print(json.dumps(json_schema(kind), indent=1, sort_keys=True))


def check(*files: Path, model: str | None = None, on: str | None = None, json: Json = False) -> int:
    """Plan run files and verify plans, run directories and cluster files; list all errors at once.

    Finds what training would refuse: plan, data, tokenizer, weights, checkpoints, missing packages.

    - `weft check run.toml cluster.toml runs/demo`
    - `weft check plan.json --on 64xh100-80gb`

    Parameters
    ----------
    files
        RUN.toml, CLUSTER.toml, PLAN.json files, or run directories.
    model
        Check run files and plans for this model instead: a preset or a folder with a config.json.
    on
        Check run files and plans on this cluster instead: an expression such as 64xa100-80gb, or a file.
    """
    if not files:
        raise InputError("check: no file given")
    found: dict[str, list[str]] = {}
    for path in files:
        try:
            problems = list(_problems_of(path, model, on))
        except InputError as error:
            problems = list(error.violations)
        # Weights are looked at twice: for their files, and for what these hold.
        found[str(path)] = list(dict.fromkeys(str(violation) for violation in problems))
    if json:
        print_json(found)
    else:
        for path_name, lines in found.items():
            print("\n".join(lines) if lines else f"{path_name}: good")
    return 2 if any(found.values()) else 0


def _problems_of(path: Path, model: str | None, on: str | None) -> Iterator[Violation]:
    if not path.is_dir() and not holds_json(path) and _is_cluster(path):
        load_cluster(path)
        return
    planned = job_in(path, model=model, on=on, plan_by=planned_visibly)
    print_warnings(planned.run.warnings)
    _ = planned.program
    yield from refusals(planned)
    yield from _weight_problems(planned)
    if path.is_dir():
        yield from checkpoint_problems(path, planned)


def _weight_problems(planned: PlannedJob) -> Iterator[Violation]:
    """Yield what the library's model or the initial weights contradict; nothing where torch is missing."""
    run, config = planned.run, planned.problem.model
    if find_spec("torch") is None or planned_only(config):
        return
    try:
        if run.model.weights:
            # Imports torch and every family's part of `transformers`, which takes seconds.
            from weft.training.interchange.imports import initial_weights

            initial_weights(Path(run.model.hf or ""), config)
        elif config.decoder is not None:
            from weft.training.interchange.matching import model_shapes

            model_shapes(config)
    except InputError as error:
        yield from error.violations


def _is_cluster(path: Path) -> bool:
    """Return True for a cluster file: it names nodes."""
    try:
        return "[[node]]" in path.read_text(errors="replace")
    except OSError as error:
        raise InputError(Violation(str(path), error.strerror or str(error))) from None
