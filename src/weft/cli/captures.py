"""The command about a user's own module or ONNX file: `capture`."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from weft.capture.graphs.subject import captured_graph
from weft.cli.output import (
    Json,
    WrittenFile,
    console,
    plain_table,
    print_json,
    say_written,
    working,
    write_asked,
)
from weft.describe.amount import Shape
from weft.describe.layer import Layer
from weft.describe.layer_graph import LayerGraph
from weft.describe.units import counted, format_bytes, format_count

_ELEMENT_BYTES = 4
_SHOWN = 8


def capture(
    source: str,
    /,
    *,
    out: Annotated[WrittenFile | None, Parameter(name=("--out", "-o"))] = None,
    level: str = "block",
    json: Json = False,
) -> None:
    """Cut a module of your own, or a model of transformers, into layers that other commands plan.

    - `weft capture package.module:function -o graph.json`
    - `weft capture package.module:function -o graph.json --level operator`
    - `weft capture model.onnx -o graph.json`

    Parameters
    ----------
    source
        package.module:function, which returns a module and an example of its inputs; or an ONNX file.
    out
        Write the layers to this file, which `weft plan` and others take as a model.
    level
        block, module or operator.
    """
    with working(f"capturing {source}"):
        graph, way = captured_graph(source, level)
    write_asked([(out, lambda: graph.to_json() + "\n")])
    if json:
        print_json(
            {
                "level": level,
                "way": way,
                **_totals(graph),
                "largest": [_record(one) for one in _largest(graph)],
            }
        )
        return
    totals = _totals(graph)
    console().print(
        f"[bold]{graph.name}[/bold] by {way}: {counted(totals['layers'], 'layer')}, "
        f"{counted(totals['edges'], 'edge')}, "
        f"{format_count(totals['parameters'])} parameters, {format_count(totals['forward_flops'])} forward "
        f"FLOPs and {format_bytes(totals['kept_bytes'])} kept in fp32 per sample"
    )
    table = plain_table()
    for title in ("largest layers", "kind", "parameters", "forward FLOPs", "kept"):
        table.add_column(title)
    for layer in _largest(graph):
        record = _record(layer)
        counts = (format_count(record["parameters"]), format_count(record["forward_flops"]))
        table.add_row(layer.name, layer.kind, *counts, format_bytes(record["kept_bytes"]))
    console().print(table)
    say_written(out)


def _totals(graph: LayerGraph) -> dict[str, Any]:
    records = [_record(layer) for layer in graph.layers]
    summed = {
        key: sum(record[key] for record in records) for key in ("parameters", "forward_flops", "kept_bytes")
    }
    shared = len(graph.tied)
    return {
        "name": graph.name,
        "layers": len(graph.layers),
        "edges": len(graph.edges),
        "shared": shared,
        **summed,
    }


def _largest(graph: LayerGraph) -> list[Layer]:
    """Return the layers with most work, and of equal ones those with most parameters."""
    shape = Shape(1, graph.sequence)
    return sorted(graph.layers, key=lambda one: (-one.flops(shape), -one.parameters(shape)))[:_SHOWN]


def _record(layer: Layer) -> dict[str, Any]:
    shape = Shape(1, 1)
    return {
        "name": layer.name,
        "kind": layer.kind,
        "parameters": round(layer.parameters(shape)),
        "forward_flops": layer.forward.flops(shape),
        "kept_bytes": _ELEMENT_BYTES * layer.kept(shape) + layer.kept_bytes(shape),
    }
