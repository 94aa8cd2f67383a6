"""Two network namespaces joined by a link of limited rate: two nodes on one machine.

It needs root and the tools `ip`, `tc`, `unshare`, `nsenter` and `setpriv`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

# Both ends of the link have the same name, each in its own namespace.
INTERFACE = "weft0"
ADDRESSES = ("10.211.7.1", "10.211.7.2")
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
BURST_BYTES, QUEUE_BYTES = 2**16, 2**24
OPENING_S = 10.0


class NamespaceError(Exception):
    """This system does not do what is needed; the text says what."""


def reason_to_skip() -> str | None:
    if os.geteuid() != 0:
        return "it needs root to make network namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"this system has no {', '.join(missing)}" if missing else None


def limit_rate(bytes_per_s: float, namespace: int | None = None) -> None:
    """Limit what leaves the namespace of a process, of this one unless given."""
    limit = f"rate {bytes_per_s * 8:.0f}bit burst {BURST_BYTES} limit {QUEUE_BYTES}"
    enter = [] if namespace is None else inside(namespace)
    _run(*enter, "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *limit.split())


@contextlib.contextmanager
def two_namespaces(lifetime_s: float, bytes_per_s: float) -> Iterator[list[int]]:
    """Processes that each hold a network namespace, joined by a pair of interfaces.

    A namespace without a name ends with its last process: nothing is left behind, however this script ends.

    Raises:
        NamespaceError: when this system has no such namespaces, interfaces or limits.
    """
    hold = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", f"{lifetime_s:.0f}"]
    holders: list[subprocess.Popen[bytes]] = []
    try:
        holders += [subprocess.Popen(hold) for _ in ADDRESSES]
        _wait_until_unshared(holders)
        ends = [["netns", str(holder.pid)] for holder in holders]
        pair = ["type", "veth", "peer", "name", INTERFACE]
        _run("ip", "link", "add", INTERFACE, *ends[0], *pair, *ends[1])
        for holder, address in zip(holders, ADDRESSES, strict=True):
            enter = inside(holder.pid)
            _run(*enter, "ip", "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in (INTERFACE, "lo"):
                _run(*enter, "ip", "link", "set", interface, "up")
            limit_rate(bytes_per_s, holder.pid)
        yield [holder.pid for holder in holders]
    finally:
        end_all(holders)


def _wait_until_unshared(holders: list[subprocess.Popen[bytes]]) -> None:
    own, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + OPENING_S
    for holder in holders:
        while holder.poll() is None and os.readlink(f"/proc/{holder.pid}/ns/net") == own:
            if time.monotonic() > deadline:
                raise NamespaceError(f"a network namespace did not open within {OPENING_S:.0f} s")
            time.sleep(0.01)
        if holder.returncode is not None:
            raise NamespaceError("this system does not let a process open a network namespace")


def inside(pid: int) -> list[str]:
    """The beginning of a command that runs in the namespace of a process."""
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NamespaceError(f"{' '.join(command)}: {done.stderr.strip()}")


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
