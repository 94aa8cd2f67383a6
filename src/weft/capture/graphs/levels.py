"""Groups of operators that become layers: single operators, leaf modules, or blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from weft.capture.graphs.exported import module_path
from weft.capture.graphs.joining import common_path, joined, unused_name
from weft.capture.graphs.subject import LEVELS
from weft.capture.graphs.values import Values, operator_name
from weft.errors import require_choice


@dataclass(frozen=True)
class OperatorGroup:
    """Core operators of one layer, in order; `kind` is that of the module, or the operator."""

    name: str
    kind: str
    nodes: tuple[Node, ...]


def groups_of(values: Values, level: str) -> list[OperatorGroup]:
    """Return the layers of a level in a topological order, in which the last one gives the output.

    Raises:
        InputError: for an unknown level.
    """
    require_choice("level", level, LEVELS)
    position = {node: index for index, node in enumerate(values.core)}
    reads = [sorted({position[values.base[one]] for one in values.read(node)}) for node in values.core]
    together = [(position[one], position[other]) for one, other in values.together]
    paths = _block_paths(values.exported.modules) if level == "block" else None
    keys = None if level == "operator" else [_key(node, paths) for node in values.core]
    ordered = joined(reads, together, keys)
    return _named([[values.core[one] for one in group] for group in ordered], level, values, paths)


def _key(node: Node, blocks: Mapping[str, str] | None) -> str:
    path = module_path(node)
    return path if blocks is None else blocks.get(path, path)


def _block_paths(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return for each module's path that of its block.

    A block is an element of a list. Lists are `ModuleList`, and a `Sequential` or `ModuleDict` of modules
    with parts. A module beside such lists, with no list of its own, is one too. Without any such list, blocks
    are the module's parts.
    """
    lists = {path for path, module in modules.items() if _is_list(module)}
    found = {}
    for path in modules:
        parts = path.split(".") if path else []
        block = ""
        for length in range(1, len(parts) + 1):
            block, above = ".".join(parts[:length]), ".".join(parts[: length - 1])
            if block in lists:
                continue
            if above in lists or not any(one.startswith(block + ".") for one in lists):
                break
        found[path] = block
    return found


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return len(module) > 0
    composite = any(any(one.children()) for one in module.children())
    return isinstance(module, nn.Sequential | nn.ModuleDict) and composite


def _named(
    groups: Sequence[Sequence[Node]], level: str, values: Values, paths: Mapping[str, str] | None
) -> list[OperatorGroup]:
    """Return groups with readable names, each once."""
    found, taken = [], set[str]()
    for nodes in groups:
        path = common_path([_key(node, paths) for node in nodes])
        operators = list(dict.fromkeys(map(operator_name, nodes)))
        module = values.exported.modules.get(path)
        whole = (
            level != "operator" and path and module is not None and (level == "block" or len(operators) > 1)
        )
        parts = "+".join(operators[:3]) + ("+..." if len(operators) > 3 else "")
        leaf = module is not None and not any(module.children())
        base = (
            path
            if path and (whole or (leaf and level != "operator"))
            else ".".join(filter(None, (path, parts)))
        )
        name = unused_name(re.sub(r"\s", "", base), taken)
        kind = type(module).__name__ if base == path and module is not None else parts
        found.append(OperatorGroup(name, kind, tuple(nodes)))
    return found
