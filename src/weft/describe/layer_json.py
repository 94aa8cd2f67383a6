"""Layers as JSON, in the files and fingerprints of a `LayerGraph`."""

from __future__ import annotations

import json
from typing import Any

from weft.describe.amount import Amount
from weft.describe.layer import PLAIN_PRODUCT, Layer, Matmul, PassWork

_AMOUNTS = ("parameters", "kept", "kept_bytes", "sent", "tensor_reduced")
_CONTEXT_AMOUNTS = ("gathered", "context_kept")
_PASSES = ("forward", "backward_input", "backward_weight")


def indented(value: Any, depth: int) -> str:
    """Return JSON of a value at this depth of a file with an indent of one per level."""
    return json.dumps(value, indent=1, sort_keys=True).replace("\n", "\n" + " " * depth)


def layer_record(layer: Layer, *, context: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"name": layer.name, "kind": layer.kind}
    for key in _AMOUNTS:
        record[key] = str(getattr(layer, key))
    if layer.products is not None:
        record |= {"products": str(layer.products), "product_bytes": str(layer.product_bytes)}
    if context and layer.gathered.terms:
        record |= {key: str(getattr(layer, key)) for key in _CONTEXT_AMOUNTS}
    works = {key: getattr(layer, key) for key in _PASSES}
    if layer.again is not None:
        works["again"] = layer.again
    for key, work in works.items():
        record[key] = {
            "matmuls": [_matmul_record(matmul) for matmul in work.matmuls],
            "memory": str(work.memory),
            "kernels": work.kernels,
        }
    return record


def layer_from(record: dict[str, Any]) -> Layer:
    # Typed loosely because Layer takes both kinds of value by name.
    passes: dict[str, Any] = {
        key: PassWork(
            matmuls=tuple(_matmul_from(item) for item in record[key]["matmuls"]),
            memory=Amount.parse(record[key]["memory"]),
            kernels=int(record[key]["kernels"]),
        )
        for key in (*_PASSES, "again")
        if key in record or key in _PASSES
    }
    amounts: dict[str, Any] = {key: Amount.parse(record[key]) for key in _AMOUNTS}
    if "products" in record:
        amounts |= {key: Amount.parse(record[key]) for key in ("products", "product_bytes")}
    amounts |= {key: Amount.parse(record[key]) for key in _CONTEXT_AMOUNTS if key in record}
    return Layer(name=str(record["name"]), kind=str(record["kind"]), **amounts, **passes)


def _matmul_record(matmul: Matmul) -> list[str]:
    """Return the four amounts, and the kernel if it is not a plain product."""
    amounts = [str(amount) for amount in (matmul.count, matmul.rows, matmul.inner, matmul.columns)]
    return amounts if matmul.kernel == PLAIN_PRODUCT else [*amounts, matmul.kernel]


def _matmul_from(record: list[str]) -> Matmul:
    count, rows, inner, columns = (Amount.parse(text) for text in record[:4])
    return Matmul(count, rows, inner, columns, *record[4:])
