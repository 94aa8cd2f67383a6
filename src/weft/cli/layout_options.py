"""The fields of `PartialLayout` as options of a command."""

from __future__ import annotations

from dataclasses import asdict, make_dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from weft.describe.layout import PartialLayout

_SCHEMAS = {name: schema["anyOf"] for name, schema in PartialLayout.model_json_schema()["properties"].items()}
_KINDS = {name: {kind.get("type", "string") for kind in kinds} for name, kinds in _SCHEMAS.items()}
# Fields that are lists of integers.
_COUNTS = {
    name
    for name, kinds in _SCHEMAS.items()
    if any(kind.get("items", {}).get("type") == "integer" for kind in kinds)
}


def _option(name: str) -> tuple[str, object, None]:
    kind = int if "integer" in _KINDS[name] else str
    words = PartialLayout.model_fields[name].description
    return name, Annotated[kind | None, Parameter(help=f"Pin {words}.")], None


LayoutOptions = make_dataclass(
    "LayoutOptions",
    map(_option, PartialLayout.model_fields),
    kw_only=True,
    # cyclopts treats a class of the standard library as a plain value.
    namespace={"__module__": __name__},
)


def decided(options: object | None) -> dict[str, Any]:
    """Return the keys of `[plan]` from `LayoutOptions`; words separated by commas become tuples."""
    if options is None:
        return {}
    given: dict[str, Any] = asdict(options)  # type: ignore[call-overload]  # its class is made at run time
    return {name: _value(name, value) for name, value in given.items()}


def _value(name: str, value: Any) -> Any:
    if not value or "array" not in _KINDS[name]:
        return value
    words = tuple(value.split(","))
    if name in _COUNTS:
        # Other words pass: the check of the run file refuses them with all its other errors.
        return tuple(int(word) if word.isdecimal() else word for word in words)
    return words if len(words) > 1 else value
