"""CSV files of measured training steps: a row holds a model, its layout, its cluster and its step time.

The columns are the fields of `Measurement`; a missing column or an empty cell takes the default.
Rows are numbered from 1, without the heading.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError

from weft.describe.kernels import Accumulation, Attention, Norm
from weft.describe.layout import PartialLayout
from weft.describe.loss_choice import WHOLE, Loss
from weft.describe.optimizers import KNOWN_OPTIMIZERS
from weft.describe.plan import Launch, Stack
from weft.describe.reading import read_text, violations_of
from weft.describe.toml_table import Count
from weft.errors import InputError, Violation, require_choice

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Precision = Literal["fp64", "fp32", "bf16", "fp16"]
Status = Literal["ok", "oom", "other"]


def _known_optimizer(name: str) -> str:
    require_choice("", name, KNOWN_OPTIMIZERS)
    return name


def _options(text: object) -> object:
    """Return the options in a cell such as `depth=4 other=1`; values stay text."""
    if not isinstance(text, str):
        return text
    pairs = [word.partition("=") for word in text.split()]
    if any(not (name and sign and value) for name, sign, value in pairs):
        raise ValueError(f"{text!r} is not a list of options, such as depth=4")
    return {name: value for name, _, value in pairs}


class Measurement(PartialLayout):
    """One row: a measured training run.

    The model is a file with a LayerGraph, or the sizes of a family. The layout is a Plan file, or a partial
    layout. The cluster is a file, an expression, or a device with counts of devices and nodes.
    """

    # Cells are text, so pydantic converts them.
    model_config = ConfigDict(extra="ignore", strict=False)

    name: str = ""
    group: str = ""
    model: str | None = None
    family: Literal["gpt", "llama", "bert"] = "gpt"
    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    ffn: Count | None = None
    gated: bool | None = None
    vocab: Count | None = None
    tied_embeddings: bool | None = None
    seq: Count | None = None
    global_batch: Count | None = None
    sequence_parallel: bool | None = None
    attention: Attention = "flash2"
    norm: Norm = "fused"
    # A program has run with one kernel; only planners choose.
    loss: Loss | None = None
    loss_parallel: bool = True
    accumulation: Accumulation = "separate"
    precision: Precision = "bf16"
    optimizer: Annotated[str, AfterValidator(_known_optimizer)] = "adamw"
    stack: Stack | None = None
    launch: Launch = "eager"
    schedule_options: Annotated[Mapping[str, int], BeforeValidator(_options)] = Field(default_factory=dict)
    gpu: str | None = None
    gpus_per_node: Count | None = None
    nodes: Count | None = None
    intra_bytes_per_s: Positive | None = None
    inter_bytes_per_s: Positive | None = None
    nics_per_node: Count = 1
    plan: str | None = None
    cluster: str | None = None
    profile: str | None = None
    measured_step_s: Positive | None = None
    status: Status = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementFile:
    """The valid rows of a file by number, the problems of the other rows, and the columns that weft ignores.

    `cells` are all rows with their original text.
    """

    path: Path
    rows: Mapping[int, Measurement]
    problems: Mapping[int, str]
    ignored: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Mapping[str, str], ...]


def read_measurements(path: Path) -> MeasurementFile:
    """Read a file of measurements; keep the valid rows and report the others in `problems`.

    Raises:
        InputError: when the file cannot be read, has no valid heading, or has no row.
    """
    reader = csv.DictReader(io.StringIO(read_text(path)), skipinitialspace=True)
    columns = [(column or "").strip() for column in reader.fieldnames or ()]
    known = [column for column in columns if column in Measurement.model_fields]
    if not known:
        raise InputError(Violation(str(path), _fault_of_heading(",".join(columns))))
    twice = sorted({column for column in known if columns.count(column) > 1})
    if twice:
        raise InputError(Violation(str(path), f"line 1 has {', '.join(twice)} more than once"))
    reader.fieldnames = columns
    rows: dict[int, Measurement] = {}
    problems: dict[int, str] = {}
    cells = []
    for number, record in enumerate(reader, start=1):
        given = {
            key: value.strip() for key, value in record.items() if isinstance(value, str) and value.strip()
        }
        cells.append(given)
        try:
            rows[number] = _row(given, too_many=None in record)
        except InputError as error:
            problems[number] = "; ".join(str(violation) for violation in error.violations)
    if not cells:
        raise InputError(Violation(str(path), "has no row below its heading"))
    return MeasurementFile(
        path=path,
        rows=rows,
        problems=problems,
        ignored=tuple(column for column in columns if column and column not in known),
        columns=tuple(column for column in columns if column),
        cells=tuple(cells),
    )


def _fault_of_heading(heading: str) -> str:
    """Return the reason why a heading has no known column."""
    if not heading.strip(","):
        return "empty; line 1 must be a heading, such as family,layers,hidden,measured_step_s"
    for sign, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if any(word.strip() in Measurement.model_fields for word in heading.split(sign)):
            return f"line 1 separates its columns by {name}; commas are needed"
    return "line 1 is not a heading of measurements; docs/score.md lists the columns"


def _row(given: Mapping[str, str], *, too_many: bool) -> Measurement:
    if too_many:
        raise InputError(Violation("row", "has more values than the heading has columns"))
    try:
        row = Measurement.model_validate(dict(given))
    except ValidationError as error:
        raise InputError(violations_of(error, "", Measurement)) from None
    if row.status == "ok" and row.measured_step_s is None:
        problem = "missing; a row that is ok has a measured step"
        raise InputError(Violation("measured_step_s", problem))
    if row.loss not in (None, WHOLE) and (row.tp or 1) > 1 and not row.loss_parallel:
        problem = f"0 with loss {row.loss}, whose chunks of logits tensor ranks divide"
        raise InputError(Violation("loss_parallel", problem, "1"))
    return row
