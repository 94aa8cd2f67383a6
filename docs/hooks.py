"""What the site says about weft's own parts is generated from them when it is built.

`{{ NAME }}` on a line of its own is replaced by what the function of that name in `GENERATED` returns;
pictures of the schedules and JSON schemas become files of the site.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import counts
import notebook_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from weft.bundles import parts
from weft.cli.files import SCHEMAS, json_schema
from weft.cli.main import app
from weft.describe.catalogue import catalogue
from weft.describe.decoder_row import ROWS, DecoderRow
from weft.describe.families import layer_graph
from weft.describe.models import PRESETS
from weft.describe.units import format_bytes, format_count
from weft.moves.composition import Composition
from weft.moves.registry import all_moves
from weft.predict.abstract import ScheduleFigures, simulate_schedule
from weft.program.schedules import SCHEDULES
from weft.program.schedules.base import Pipeline
from weft.web.charts.timeline import timeline_svg

DEVICES = 4
MICRO_BATCHES = 8
LOOPS = 2
# Limits this far out only guard against overflow and would distract.
UNBOUNDED = 1_000_000_000
ROOT = Path(__file__).parent.parent
MARKER = re.compile(r"^\{\{ (\w+) \}\}$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that are not files of `docs/`."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=contributing))
    for path in notebook_pages.NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        text = notebook_pages.page(notebook, path.stem)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    for name in SCHEDULES:
        title = f"{name}: {DEVICES} devices, {MICRO_BATCHES} micro-batches"
        picture = timeline_svg(_figures(name).timeline, title=title)
        files.append(File.generated(config, f"pictures/schedule-{name}.svg", content=picture))
    for kind in SCHEMAS:
        text = json.dumps(json_schema(kind), indent=1)
        files.append(File.generated(config, f"reference/schema-{kind}.json", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated."""
    return MARKER.sub(lambda match: GENERATED[match[1]](), markdown)


def commands() -> str:
    """The reference that the command line writes of itself, without its title and table of contents."""
    text = app.generate_docs(output_format="markdown", heading_level=1)
    title, rest = text.split("## Table of Contents", 1)
    return title.split("\n", 1)[1] + rest[rest.index("**Commands**") :]


def schedules() -> str:
    return "\n\n".join(_schedule(name) for name in SCHEDULES)


def _schedule(name: str) -> str:
    schedule, figures = SCHEDULES[name], _figures(name)
    in_flight = ", ".join(str(count) for count in figures.peak_in_flight)
    synonyms = ", ".join(f"`{word}`" for word in schedule.synonyms)
    facts = (
        *((f"also called {synonyms}",) if synonyms else ()),
        f"a step takes {float(figures.makespan):g}, where {float(figures.ideal):g} would be ideal",
        f"bubble {figures.bubble_fraction:.1%} of the time, {figures.bubble_overhead:.1%} over the ideal",
        f"in flight on each rank: {in_flight} pairs of stage and micro-batch",
    )
    return "\n\n".join(
        (
            f"## {name}",
            _summary(schedule),
            f"![Timeline of {name}](pictures/schedule-{name}.svg)",
            "\n".join(f"- {fact}" for fact in facts),
        )
    )


def _figures(name: str) -> ScheduleFigures:
    looped = Pipeline(DEVICES, LOOPS * DEVICES, MICRO_BATCHES)
    loops = LOOPS if SCHEDULES[name].refuse(looped, {}) is None else 1
    return simulate_schedule(name, devices=DEVICES, loops=loops, micro_batches=MICRO_BATCHES)


def moves() -> str:
    rows = [
        (
            move.name,
            move.contract.word,
            move.summary,
            ", ".join(sorted(move.purposes)),
            move.verify,
            move.source,
        )
        for move in all_moves().values()
    ]
    head = ("move", "contract", "what it does", "tried for layouts", "how the contract is tested", "source")
    return _table(head, rows)


def compositions() -> str:
    rows = [(one.method, one.other, one.reason) for one in parts(Composition)]
    return _table(("method", "does not always go with", "because"), rows)


def devices() -> str:
    rows = [
        (
            f"`{name}`",
            format_bytes(entry.device.memory_bytes),
            f"{format_bytes(entry.device.memory_bytes_per_s)}/s",
            *(
                _flops(entry.device.flops_per_s.get(precision))
                for precision in ("fp32", "bf16", "fp16", "fp8")
            ),
            f"{entry.devices} at {format_bytes(entry.link.bytes_per_s)}/s",
            f"{format_bytes(entry.network.bytes_per_s)}/s",
        )
        for name, entry in catalogue().items()
    ]
    head = ("device", "memory", "bandwidth", "fp32", "bf16", "fp16", "fp8", "node", "network per node")
    return _table(head, rows)


def device_sources() -> str:
    return "\n".join(f"- `{name}`: {entry.source}" for name, entry in catalogue().items())


def _flops(flops_per_s: float | None) -> str:
    return "-" if flops_per_s is None else f"{format_count(flops_per_s)}FLOP/s"


def models() -> str:
    rows = [
        (
            f"`{name}`",
            config.family,
            str(config.layers),
            str(config.hidden or "-"),
            str(config.heads or "-"),
            str(config.sequence),
            format_count(layer_graph(config).parameters()),
        )
        for name, config in PRESETS.items()
    ]
    return _table(("preset", "family", "layers", "hidden", "heads", "sequence", "parameters"), rows)


def decoders() -> str:
    def word(fact: bool) -> str:
        return "yes" if fact else "-"

    def divides_heads(row: DecoderRow) -> bool:
        return not (row.undivided or row.linear or row.query_key_norm == "together")

    rows = [
        (
            f"`{name}`",
            "yes",
            word(row.trained),
            word(row.trained and row.exported),
            word(row.trained and divides_heads(row)),
            word(row.trained and not (row.attention_cap or row.linear or row.indexer)),
        )
        for name, row in ROWS.items()
    ]
    return _table(("`model_type`", "planned", "trained", "exported", "tensor ranks", "context ranks"), rows)


def counts_of(stack: str) -> str:
    return _table((stack, "weft", "meaning"), counts.rows(stack))


def run_file() -> str:
    """The tables of a run file, from its JSON schema."""
    schema = json_schema("run")
    parts = []
    for name, table in schema["properties"].items():
        record = _resolve(schema, table)
        head = ("key", "allowed", "default", "meaning")
        rows = [
            (
                f"`{key}`",
                _allowed(schema, entry),
                _default(entry, key in record.get("required", ())),
                entry.get("description", ""),
            )
            for key, entry in record["properties"].items()
        ]
        parts.append(f"### [{name}]\n\n{_table(head, rows)}")
    return "\n\n".join(parts)


def _resolve(schema: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """The entry itself, or the table it refers to."""
    options = [option for option in entry.get("anyOf", (entry,)) if option.get("type") != "null"]
    reference = options[0].get("$ref")
    resolved: dict[str, Any] = schema["$defs"][reference.rsplit("/", 1)[1]] if reference else options[0]
    return resolved


def _allowed(schema: dict[str, Any], entry: dict[str, Any]) -> str:
    options = [option for option in entry.get("anyOf", (entry,)) if option.get("type") != "null"]
    return " or ".join(_type_text(_resolve(schema, option)) for option in options)


_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def _type_text(option: dict[str, Any]) -> str:
    if "enum" in option:
        return ", ".join(f"`{value}`" for value in option["enum"])
    if "const" in option:
        return f"`{option['const']}`"
    limits = " and ".join(
        f"{word} {option[key]:g}"
        for key, word in _LIMITS.items()
        if abs(option.get(key, UNBOUNDED)) < UNBOUNDED
    )
    return f"{option.get('type', 'value')} {limits}".strip()


def _default(entry: dict[str, Any], required: bool) -> str:
    if required:
        return "must be given"
    default = entry.get("default")
    return "-" if default is None else f"`{json.dumps(default)}`"


def _summary(documented: object) -> str:
    return (documented.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join(_table_lines(tuple(head), rows))


def _table_lines(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


GENERATED: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        commands,
        schedules,
        moves,
        compositions,
        devices,
        device_sources,
        models,
        decoders,
        run_file,
    )
} | {f"counts_of_{stack.lower().replace('-', '_')}": partial(counts_of, stack) for stack in counts.STACKS}
