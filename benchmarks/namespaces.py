"""Two network namespaces joined by a link of limited rate: two nodes on one machine.

It needs root and the tools `ip`, `tc`, `unshare`, `nsenter` and `setpriv`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from harness import Report, Worker, parser_of_ranks, words_for_workers

# Both ends of the link have the same name, each in its own namespace.
INTERFACE = "weft0"
ADDRESSES = ("10.211.7.1", "10.211.7.2")
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
BURST_BYTES, QUEUE_BYTES = 2**16, 2**24
OPENING_S = 10.0
# Of Ethernet, of IPv4, and of TCP with time stamps.
HEADER_BYTES = 14 + 20 + 32
PORT = 29500
POLL_S = 0.2


class NamespaceError(Exception):
    """This system does not do what is needed; the text says what."""


def reason_to_skip() -> str | None:
    if os.geteuid() != 0:
        return "it needs root to make network namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"this system has no {', '.join(missing)}" if missing else None


def limit_rate(bytes_per_s: float | None, namespace: int | None = None) -> None:
    """Limit what leaves the namespace of a process, of this one unless given; None lets all pass."""
    how = ["noqueue"]
    if bytes_per_s is not None:
        how = f"tbf rate {bytes_per_s * 8:.0f}bit burst {BURST_BYTES} limit {QUEUE_BYTES}".split()
    enter = [] if namespace is None else inside(namespace)
    _run(*enter, "tc", "qdisc", "replace", "dev", INTERFACE, "root", *how)


class Sent(NamedTuple):
    """What has left a namespace over the link: bytes with all headers, and packets."""

    bytes: int
    packets: int

    @classmethod
    def now(cls) -> Sent:
        # `/sys/class/net` shows the namespace in which it was mounted.
        lines = Path("/proc/self/net/dev").read_text().splitlines()
        counters = next(line.split() for line in lines if line.strip().startswith(f"{INTERFACE}:"))
        return cls(int(counters[9]), int(counters[10]))

    def since(self, before: Sent) -> Sent:
        return Sent(self.bytes - before.bytes, self.packets - before.packets)

    @property
    def payload_bytes(self) -> int:
        return self.bytes - HEADER_BYTES * self.packets


@contextlib.contextmanager
def two_namespaces(lifetime_s: float, bytes_per_s: float | None) -> Iterator[list[int]]:
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


def launch(
    report: Report, command: Sequence[str], *, devices: int, bytes_per_s: float | None, limit_s: float
) -> int:
    """Run `command --worker` as so many ranks in each of two namespaces; return the exit code.

    The report says why if this system has no such namespaces.
    """
    reason = reason_to_skip()
    if reason is not None:
        report.say(f"skipped: {reason}")
        return 0
    report.print_machine()
    signal.signal(signal.SIGTERM, _stop)
    try:
        with two_namespaces(2 * limit_s, bytes_per_s) as namespaces:
            return 0 if _run_ranks(namespaces, command, devices, limit_s) else 1
    except NamespaceError as error:
        report.say(f"skipped: {error}")
        return 0
    except KeyboardInterrupt:
        return 130


def parser_on_links(documentation: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark of one rank in each of two namespaces."""
    made = parser_of_ranks(documentation)
    made.add_argument("--quick", action="store_true", help="fewer links and steps")
    return made


def main_on_links(name: str, script: str, asked: argparse.Namespace, worker: Worker, limit_s: float) -> int:
    """Run such a benchmark, or be one of its ranks, which `worker` is for; return the exit code."""
    report = Report(name, asked)
    if asked.worker:
        worker(report, asked)
        return 0
    words = [*(["--quick"] if asked.quick else []), *words_for_workers(asked)]
    return launch(report, [script, *words], devices=1, bytes_per_s=None, limit_s=limit_s)


def _start_ranks(
    namespaces: list[int], command: Sequence[str], devices: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Node by node, device by device, as a cluster counts its ranks."""
    ranks = devices * len(namespaces)
    for rank in range(ranks):
        node, device = divmod(rank, devices)
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(device),
            "LOCAL_WORLD_SIZE": str(devices),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            # A namespace has no name server, of which torch would warn.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        entered = [*inside(namespaces[node]), sys.executable, *command, "--worker"]
        # Of its own session: Ctrl-C reaches this script, which ends the ranks.
        yield subprocess.Popen(entered, env=os.environ | environment, start_new_session=True)


def _run_ranks(namespaces: list[int], command: Sequence[str], devices: int, limit_s: float) -> bool:
    """Whether all ranks ended well within the time limit; none is left when this returns."""
    ranks: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + limit_s
    try:
        ranks.extend(_start_ranks(namespaces, command, devices))
        while any(rank.poll() is None for rank in ranks):
            if any(rank.returncode for rank in ranks):
                return False
            if time.monotonic() > deadline:
                print(f"the ranks did not finish within {limit_s:.0f} s", file=sys.stderr)
                return False
            time.sleep(POLL_S)
        return not any(rank.returncode for rank in ranks)
    finally:
        end_all(ranks)


def _stop(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)
