"""The network of a lab: a namespace per node, each joined to a bridge in a separate namespace.

Outgoing traffic of a node is limited per link (htb, a class per destination), incoming traffic as a whole
(tbf). The host's own network does not change.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.errors import InputError, Violation
from weft.lab.scheme import HUB_ADDRESS, INTERFACE, NETWORK_BITS, Scheme, least_rates, pid_of

NAMESPACES = Path("/run/netns")
BRIDGE = "bridge0"
# Large packets cost little, but a message may exceed a limit by one burst: about one millisecond.
PACKET_BYTES = 9000
LEAST_BURST_BYTES, BURST_S = 2 * PACKET_BYTES, 1e-3
QUEUE_BYTES = 2**22
# For traffic outside the nodes: the launcher's side in the bridge's namespace.
UNLIMITED = "40gbit"
# Parts of the kernel, by their names in commands.
PARTS = ("u32", "htb", "tbf", "veth", "bridge")


def make_network(scheme: Scheme) -> None:
    """Make all namespaces and interfaces; after a failure, `remove_namespaces` removes the part that exists.

    Raises:
        InputError: when this kernel lacks a required part.
    """
    for namespace in (scheme.hub, *(node.namespace for node in scheme.nodes)):
        _run("ip", "netns", "add", namespace)
    _batch("ip", scheme.hub, hub_commands(scheme))
    for index, node in enumerate(scheme.nodes):
        _batch("ip", node.namespace, node_commands(scheme, index))
        _batch("tc", node.namespace, limits_out(scheme, index))
    _batch("tc", scheme.hub, limits_in(scheme))


def remove_namespaces(pid: int) -> None:
    """Remove every namespace, with its interfaces, of the lab of process `pid`."""
    for namespace in lab_namespaces():
        if pid_of(namespace) == pid:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def lab_namespaces() -> list[str]:
    """Return the sorted names of all labs' namespaces."""
    names = (path.name for path in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else ()
    return sorted(name for name in names if pid_of(name) is not None)


def hub_commands(scheme: Scheme) -> Iterator[str]:
    """Yield the `ip` commands for the bridge's namespace."""
    yield f"link add {BRIDGE} mtu {PACKET_BYTES} type bridge"
    yield f"address add {HUB_ADDRESS}/{NETWORK_BITS} dev {BRIDGE}"
    yield "link set lo up"
    yield f"link set {BRIDGE} up"
    for index, node in enumerate(scheme.nodes):
        yield (
            f"link add {_port(index)} mtu {PACKET_BYTES} type veth "
            f"peer name {INTERFACE} mtu {PACKET_BYTES} netns {node.namespace}"
        )
        yield f"link set {_port(index)} gso_max_size {LEAST_BURST_BYTES} master {BRIDGE} up"


def node_commands(scheme: Scheme, index: int) -> Iterator[str]:
    """Yield the `ip` commands for a node's namespace."""
    yield f"address add {scheme.nodes[index].address}/{NETWORK_BITS} dev {INTERFACE}"
    yield "link set lo up"
    yield f"link set {INTERFACE} gso_max_size {LEAST_BURST_BYTES} up"


def limits_out(scheme: Scheme, index: int) -> Iterator[str]:
    """Yield the `tc` commands for a node's namespace: a class per other node, under a common class."""
    node = scheme.nodes[index]
    yield f"qdisc add dev {INTERFACE} root handle 1: htb default 2"
    yield f"class add dev {INTERFACE} parent 1: classid 1:2 htb rate {UNLIMITED} quantum {PACKET_BYTES}"
    if not node.rate:
        return
    yield f"class add dev {INTERFACE} parent 1: classid 1:1 {_class(node.rate, node.rate)}"
    for other, least in enumerate(least_rates(node.rates)):
        if other == index:
            continue
        kind = f"1:{other + 16:x}"
        yield f"class add dev {INTERFACE} parent 1:1 classid {kind} {_class(least, node.rates[other])}"
        to = f"{scheme.nodes[other].address}/32"
        yield f"filter add dev {INTERFACE} parent 1: protocol ip prio 1 u32 match ip dst {to} flowid {kind}"


def limits_in(scheme: Scheme) -> Iterator[str]:
    """Yield the `tc` commands for the bridge's namespace: limits of each node's incoming traffic."""
    for index, node in enumerate(scheme.nodes):
        if node.rate:
            limit = f"rate {_bits(node.rate)} burst {_burst(node.rate)} limit {QUEUE_BYTES}"
            yield f"qdisc add dev {_port(index)} root tbf {limit}"


def _class(rate: float, ceiling: float) -> str:
    bursts = f"burst {_burst(rate)} cburst {_burst(ceiling)} quantum {PACKET_BYTES}"
    return f"htb rate {_bits(rate)} ceil {_bits(ceiling)} {bursts}"


def _bits(bytes_per_s: float) -> str:
    return f"{max(8, round(bytes_per_s * 8))}bit"


def _burst(bytes_per_s: float) -> int:
    return max(LEAST_BURST_BYTES, round(bytes_per_s * BURST_S))


def _port(index: int) -> str:
    return f"node{index}"


def _batch(tool: str, namespace: str, commands: Iterator[str]) -> None:
    _run(tool, "-n", namespace, "-batch", "-", commands=list(commands))


def _run(*command: str, commands: Sequence[str] = ()) -> None:
    text = "".join(f"{line}\n" for line in commands)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(_why(command, done.stderr, commands))


def _why(command: Sequence[str], said: str, commands: Sequence[str]) -> Violation:
    """Find the kernel part that is missing, from the error of `ip` or `tc` and the failed line of input."""
    first = (said.strip().splitlines() or ["no reason given"])[0]
    failed = re.search(r"-:(\d+)", said)
    line = commands[int(failed[1]) - 1] if failed else ""
    if re.search(r"unknown|not supported", said, re.IGNORECASE):
        part = next((part for part in PARTS if f" {part}" in f" {line}"), "network namespaces")
        return Violation("lab", f"this kernel has no {part} ({first}); load its module or use another kernel")
    return Violation(
        "lab", f"{' '.join(command)}: {line}: {first}" if line else f"{' '.join(command)}: {first}"
    )
