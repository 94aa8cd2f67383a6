"""Read the nodes of a list, whichever tool wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from weft.describe.inventory.kubernetes import KubernetesNodes
from weft.describe.inventory.listed_node import ListedNode
from weft.describe.inventory.slurm import ShownNodes, SinfoRows, slurm_text
from weft.describe.reading import violations_of
from weft.errors import InputError, Violation

_READ = "scontrol show nodes, with or without --json, sinfo --json, slurm.conf, kubectl get nodes -o json"
_ANSWERS: Mapping[str, type[KubernetesNodes | ShownNodes | SinfoRows]] = {
    "items": KubernetesNodes,
    "nodes": ShownNodes,
    "sinfo": SinfoRows,
}


def read_nodes(text: str, where: str) -> tuple[ListedNode, ...]:
    """Return the nodes of a list, each once for every kind of its devices.

    Raises:
        InputError: if the text is no list of nodes that weft reads, naming `where`.
    """
    nodes = _of_json(text, where) if text.lstrip().startswith("{") else tuple(slurm_text(text))
    if not nodes:
        raise InputError(Violation(where, f"no list of nodes; weft reads {_READ}"))
    # A node may be in several partitions.
    return tuple(dict.fromkeys(nodes))


def _of_json(text: str, where: str) -> Sequence[ListedNode]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(Violation(where, f"not valid JSON: {error}")) from None
    answer = next((answer for key, answer in _ANSWERS.items() if key in record), None)
    if answer is None:
        return ()
    try:
        return tuple(answer.model_validate(record).listed())
    except ValidationError as error:
        raise InputError(violations_of(error, where, answer)) from None
