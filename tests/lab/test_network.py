"""Commands of a lab's network: every pair of nodes has its rate; what a kernel lacks is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lab.clusters import mixed

from weft.errors import InputError
from weft.lab.network import hub_commands, limits_in, limits_out, make_network, node_commands
from weft.lab.scheme import scheme_of

SCHEME = scheme_of(mixed([1.0, 0.5, 0.5], bytes_per_s=2e7), range(2), 5)


def test_every_other_node_has_a_class_at_the_links_rate_and_a_filter() -> None:
    for index in range(3):
        lines = list(limits_out(SCHEME, index))
        others = [other for other in range(3) if other != index]
        filters = [line for line in lines if line.startswith("filter")]
        assert [line.split(" dst ")[1].split("/")[0] for line in filters] == [
            SCHEME.nodes[other].address for other in others
        ]
        for line in filters:
            kind = line.split()[-1]
            (own,) = (one for one in lines if f"classid {kind} " in one)
            assert "parent 1:1 " in own
            assert " rate 80000000bit ceil 160000000bit " in own
    assert all(" tbf rate 160000000bit " in line for line in limits_in(SCHEME))


def test_a_node_alone_has_no_limits() -> None:
    alone = scheme_of(mixed([1.0]), range(2), 5)
    assert not any("tbf" in line or "filter" in line for line in (*limits_out(alone, 0), *limits_in(alone)))


def test_every_node_is_joined_to_the_bridge() -> None:
    lines = list(hub_commands(SCHEME))
    for index, node in enumerate(SCHEME.nodes):
        assert sum(f"netns {node.namespace}" in line for line in lines) == 1
        assert any(node.address in line for line in node_commands(SCHEME, index))


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, tool: str, complaint: str) -> None:
    """`ip` and `tc` that do nothing, but for one that complains of its second line."""
    for name in ("ip", "tc"):
        script = folder / name
        fails = f"echo '{complaint}' >&2; exit 1" if name == tool else ""
        script.write_text(f"#!/bin/sh\ncat > /dev/null\n{fails}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_a_kernel_without_a_part_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, "tc", "Error: Specified qdisc kind is unknown.\nCommand failed -:1")
    with pytest.raises(InputError, match=r"this kernel has no htb .*load its module or use another kernel"):
        make_network(SCHEME)
    pretend(tmp_path, monkeypatch, "ip", "mount --make-shared /run/netns failed: Operation not permitted")
    with pytest.raises(InputError, match="ip netns add weft-lab-5-hub: mount --make-shared"):
        make_network(SCHEME)
