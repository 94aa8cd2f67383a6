"""Options of `weft measure`: micro-batch sizes and tensor-parallel degrees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.describe.cluster import Cluster
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation

MICRO_BATCH_SIZES = (1, 2, 4, 8)
DEGREES_OPTION = "--tensor-parallel"


def counts_of(option: str, text: str) -> tuple[int, ...]:
    """Read whole numbers of at least 1, separated by commas; return each once, ascending.

    Raises:
        InputError: with the option and every wrong word.
    """
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not (word.isascii() and word.isdigit() and int(word) > 0)]
    if wrong:
        named = ", ".join(map(repr, wrong))
        raise InputError(Violation(option, f"{named}, allowed: whole numbers of at least 1", "1,2,4"))
    return tuple(sorted({int(word) for word in words}))


def require_degrees(cluster: Cluster, model: ModelConfig, degrees: Sequence[int]) -> None:
    """Check that all tensor degrees divide the model's layers and the devices of every node.

    Raises:
        InputError: with a violation for each wrong degree.
    """
    graph = layer_graph(model)
    devices = set(Counter(cluster.node_of(rank) for rank in range(cluster.ranks)).values())
    problems = []
    for degree in degrees:
        odd = sorted(count for count in devices if count % degree)
        if (reason := graph.refuse_tensor(degree)) is not None:
            problems.append(Violation(DEGREES_OPTION, reason))
        elif odd:
            near = max(
                one
                for one in range(1, degree)
                if graph.refuse_tensor(one) is None and not any(count % one for count in devices)
            )
            problem = f"{degree} does not divide the {odd[0]} devices of a node of {cluster.name}"
            problems.append(Violation(DEGREES_OPTION, problem, str(near)))
    if problems:
        raise InputError(problems)
