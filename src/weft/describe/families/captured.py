"""Layer graphs from files, such as `weft capture` writes: costs alone, which are planned and not trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.describe.families.own import graph_config
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.reading import read_text

FAMILY = "captured"


def is_layer_graph(record: Mapping[str, Any]) -> bool:
    """Return True if a file's record is that of a layer graph, and of no model configuration."""
    return "layers" in record and "edges" in record and "model_type" not in record


def captured_config(path: Path) -> ModelConfig:
    """Return the sizes of the model in a layer graph's file, whose text is its record.

    Raises:
        InputError: when the file is not a layer graph.
    """
    text = read_text(path)
    graph = LayerGraph.from_json(text, str(path))
    return graph_config(graph, name=graph.name, family=FAMILY, record=text)


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers of the file."""
    return LayerGraph.from_json(config.record, config.name)
