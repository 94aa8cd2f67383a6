"""Nodes of Slurm: `scontrol show nodes`, with or without `--json`, `sinfo --json`, and slurm.conf.

Sources: the manual pages of scontrol, sinfo, slurm.conf and gres.conf.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from weft.describe.inventory.device_names import is_slice
from weft.describe.inventory.listed_node import ListedNode
from weft.describe.inventory.tool_record import ToolRecord
from weft.errors import InputError, Violation

_PAIR = re.compile(r"(?:^|\s)([A-Za-z_]+)=(\S*)")
# gpu:a100:4(S:0-1), gpu:4; and gres/gpu:a100=4, gres/gpu=4 of CfgTRES.
_GRES = re.compile(r"(?:^|,)gpu(?::([^,:()]+))?:(\d+)")
_TRES = re.compile(r"(?:^|,)gres/gpu(?::([^,=]+))?=(\d+)")
_UNUSABLE = ("DOWN", "DRAIN", "FAIL", "ERROR", "NOT_RESPONDING", "UNKNOWN", "MAINT")
# Only `scontrol show nodes` has these.
_SHOWN = {"arch", "cfgtres", "nodehostname", "alloctres", "slurmdstarttime"}
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_NODES = 10**5


def _words(value: Any) -> Any:
    """Return the words of a text, and any other value as it is."""
    if not isinstance(value, str):
        return value
    return tuple(word for word in re.split(r"[,+]", value) if word not in ("", "(null)"))


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]


class ShownNode(ToolRecord):
    """A node of `scontrol show nodes --json`."""

    name: str
    gres: str | None = None
    tres: str | None = None
    features: Words = ()
    state: Words = ()
    state_flags: Words = ()


class ShownNodes(ToolRecord):
    """The answer of `scontrol show nodes --json`."""

    nodes: tuple[ShownNode, ...]

    def listed(self) -> Iterator[ListedNode]:
        for node in self.nodes:
            states = (*node.state, *node.state_flags)
            yield from _nodes(node.name, node.gres, node.tres, node.features, states)


class _Names(ToolRecord):
    nodes: Words = ()


class _States(ToolRecord):
    state: Words = ()


class _Totals(ToolRecord):
    total: str | None = None


class SinfoRow(ToolRecord):
    """A row of `sinfo --json`: nodes of one partition that are alike."""

    nodes: _Names
    node: _States = _States()
    gres: _Totals = _Totals()
    features: _Totals = _Totals()


class SinfoRows(ToolRecord):
    """The answer of `sinfo --json`."""

    sinfo: tuple[SinfoRow, ...]

    def listed(self) -> Iterator[ListedNode]:
        for row in self.sinfo:
            for name in row.nodes.nodes:
                features = _words(row.features.total or "")
                yield from _nodes(name, row.gres.total, None, features, row.node.state)


def slurm_text(text: str) -> Iterator[ListedNode]:
    """Yield the nodes of `scontrol show nodes`, one or many lines each, and of a slurm.conf."""
    usual: Mapping[str, str] = {}
    # Reasons and comments of people may hold anything, such as another state.
    text = re.sub(r"(?m)^\s*#.*$|\b(?:Reason|Comment|Extra)=.*$", "", text.replace("\\\n", " "))
    for record in re.split(r"(?m)^\s*(?=NodeName=)", text):
        first, *rest = record.splitlines() or [""]
        # scontrol indents the later lines of a node; in a slurm.conf, other entries follow.
        lines = (first, *(line for line in rest if line[:1].isspace()))
        pairs = {key.lower(): value for line in lines for key, value in _PAIR.findall(line)}
        if (names := pairs.get("nodename")) is None:
            continue
        if names == "DEFAULT":
            usual = pairs
            continue
        pairs = {**usual, **pairs}
        keys = ("availablefeatures", "features", "feature")
        features = _words(next((pairs[key] for key in keys if key in pairs), ""))
        states = _words(pairs.get("state", ""))
        if not _SHOWN & pairs.keys():
            # In a slurm.conf this is the usual state: controllers find out.
            states = tuple(one for one in states if one.upper() != "UNKNOWN")
        for name in expanded(names):
            yield from _nodes(name, pairs.get("gres"), pairs.get("cfgtres"), features, states)


def expanded(names: str) -> Iterator[str]:
    """Yield the names of a host list such as ``gpu[01-03,7],login``.

    Raises:
        InputError: for an open bracket, and for a range that is empty or too long.
    """
    if names.count("[") != names.count("]"):
        raise InputError(Violation(f"NodeName={names}", "a bracket is not closed"))
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", names):
        before, bracket, rest = item.partition("[")
        inside, _, after = rest.partition("]")
        if not bracket:
            yield item
            continue
        for first, last in _RANGE.findall(inside):
            numbers = range(int(first), int(last or first) + 1)
            if not 0 < len(numbers) <= _MOST_NODES:
                problem = f"a range has 1 to {_MOST_NODES} nodes, lowest number first"
                raise InputError(Violation(f"NodeName={item}", problem))
            for number in numbers:
                for end in expanded(after) if after else ("",):
                    yield f"{before}{number:0{len(first)}}{end}"


def _nodes(
    name: str, gres: str | None, tres: str | None, features: tuple[str, ...], states: tuple[str, ...]
) -> Iterator[ListedNode]:
    """Yield a node for each kind of its devices, or one without devices."""
    named, totals = _GRES.findall(gres or ""), _TRES.findall(tres or "")
    kinds = named or [kind for kind in totals if kind[0]] or totals
    bad = [state for state in states if state.upper().startswith(_UNUSABLE) or state.endswith("*")]
    for device, count in kinds or [("", "0")]:
        sliced = "slices of a device" if is_slice(device) else ""
        unusable = "+".join(bad) or sliced
        yield ListedNode(name=name, device=device, devices=int(count), hints=features, unusable=unusable)
