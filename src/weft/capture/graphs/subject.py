"""The subject of `weft capture`: a function of the user's, or an ONNX file."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from weft.capture.graphs.onnx_file import read_onnx
from weft.describe.families.own import OwnModel
from weft.describe.layer_graph import LayerGraph
from weft.describe.toml_table import is_importable
from weft.errors import InputError, Violation, require_choice
from weft.installed import failure, imported, remedy

LEVELS = ("block", "module", "operator")


def captured_graph(source: str, level: str) -> tuple[LayerGraph, str]:
    """Return the layers of `package.module:function`, and the way by which they were found.

    The function returns a module and an example of its inputs, or a model that has its layers. The source may
    also be the path of an ONNX file.

    Raises:
        InputError: when the source is nothing of this kind, or cannot be captured.
    """
    require_choice("--level", level, LEVELS)
    if source.endswith(".onnx"):
        graph = read_onnx(Path(source), level)
        return graph, f"the table of ONNX operators{_one_layer(graph, level)}"
    if not is_importable(source):
        raise InputError(
            Violation(
                "capture", f"{source!r} is neither of the form package.module:function nor an ONNX file"
            )
        )
    if find_spec("torch") is None:
        raise InputError(Violation("capture", f"needs torch, which is not installed: {remedy('torch')}"))
    function = imported("capture", source)
    if not callable(function):
        raise InputError(Violation("capture", f"{source!r} is no function"))
    try:
        made = function()
    except InputError:
        raise
    except Exception as error:
        raise InputError(Violation("capture", f"{source!r} fails: {failure(error)}")) from None
    if isinstance(made, OwnModel):
        return replace(made.layer_graph(), name=source), "its own layers"
    from torch import nn

    from weft.capture.graphs.captured import CapturedModel

    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        problem = f"{source!r} returned {type(made).__name__}; needed: a module and an example of its inputs"
        raise InputError(Violation("capture", problem))
    return replace(CapturedModel(*made, level=level).layer_graph(), name=source), "torch.export"


def _one_layer(graph: LayerGraph, level: str) -> str:
    """Return a note if all operators of an ONNX file are one layer, whose name is then its kind."""
    if level == "operator" or [one.name for one in graph.layers] != [graph.layers[0].kind]:
        return ""
    return " (names of operators tell no modules; --level operator needs none)"
