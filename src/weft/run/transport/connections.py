"""TCP connections between pairs of ranks, for messages between stages.

Every rank listens on a port that the operating system chooses, and sends its address to all. In each pair the
rank with the higher number connects. A rank accepts only callers that know the random token it drew for this.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from weft.errors import InputError, RunError, Violation
from weft.run.launch.interfaces import GLOO_INTERFACE, address_of

LOOPBACK = "127.0.0.1"
# A rank greets at once. A caller that does not is no rank, and makes others wait.
GREETING_TIMEOUT_S = 5.0

# A machine that vanishes closes nothing: connections to it fail after 50 s. Not all systems have these.
_KEEP_ALIVE = {
    getattr(socket, option): value
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 8), ("TCP_KEEPCNT", 5))
    if hasattr(socket, option)
}

_TOKEN_BYTES = 16
# Address, port and token of a rank; token, connecting rank and the index of the connection's name.
_WHERE = struct.Struct(f"!46sH{_TOKEN_BYTES}s")
_GREETING = struct.Struct(f"!{_TOKEN_BYTES}sII")

Connections = dict[tuple[int, str], socket.socket]


def connect(
    peers: Collection[int],
    names: Sequence[str],
    timeout_s: float,
    group: dist.ProcessGroup | None = None,
    *,
    endless: bool = False,
) -> Connections:
    """Connect to `peers`, once for each of `names`; every rank of the job's process group calls this.

    Args:
        peers: ranks that name this one among their own peers.
        names: the same names, in the same order, on all ranks.
        timeout_s: seconds to wait for the others, and later for any byte of a message.
        group: all ranks of the job, over gloo; None takes the default group.
        endless: bytes of a message may take any time.

    Raises:
        InputError: when the ranks have no addresses at which they can reach each other.
        RunError: names the rank that could not be reached, or did not connect.
    """
    rank = dist.get_rank()
    deadline = time.monotonic() + timeout_s
    with socket.create_server((own_address(), 0), backlog=max(1, len(peers) * len(names))) as server:
        token = secrets.token_bytes(_TOKEN_BYTES)
        host, port, *_ = server.getsockname()
        addresses = _tell_all(host, port, token, group)
        require_reachable([host for host, _, _ in addresses])
        found: Connections = {}
        try:
            for peer in sorted(peer for peer in peers if peer < rank):
                for index, name in enumerate(names):
                    found[peer, name] = _call(rank, peer, index, addresses[peer], deadline)
            expected = {(peer, name) for peer in peers if peer > rank for name in names}
            while expected:
                key, line = _answer(server, token, names, expected, deadline)
                expected.remove(key)
                found[key] = line
        except TimeoutError as error:
            _hang_up(found)
            missing = ", ".join(str(peer) for peer in sorted({peer for peer, _ in expected}))
            problem = f"rank {rank}: ranks {missing} did not connect within {timeout_s:g} s"
            raise RunError(problem) from error
        except BaseException:
            _hang_up(found)
            raise
    for line in found.values():
        _make_ready(line, 0.0 if endless else timeout_s)
    return found


def _hang_up(connections: Connections) -> None:
    for line in connections.values():
        line.close()


def own_address() -> str:
    """Return this rank's address for other ranks: of gloo's interface if set, else on the route to
    MASTER_ADDR.

    Raises:
        InputError: when the interface has no IPv4 address.
    """
    if (interface := os.environ.get(GLOO_INTERFACE)) is not None:
        return address_of(interface, GLOO_INTERFACE)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            # This sends nothing and only looks up the route of a packet.
            route.connect((os.environ.get("MASTER_ADDR", LOOPBACK), 9))
            return str(route.getsockname()[0])
    except OSError:
        return LOOPBACK


def require_reachable(addresses: Sequence[str]) -> None:
    """Refuse ranks on several machines if one gives an address that only itself can reach.

    Raises:
        InputError: names the first such rank.
    """
    alone = [rank for rank, address in enumerate(addresses) if address.startswith("127.")]
    if alone and len(alone) < len(addresses):
        problem = f"other ranks cannot reach {addresses[alone[0]]}, the address of rank {alone[0]}"
        raise InputError(
            Violation("worker", problem, f"MASTER_ADDR or {GLOO_INTERFACE} that leads to others")
        )


def _tell_all(
    host: str, port: int, token: bytes, group: dist.ProcessGroup | None = None
) -> list[tuple[str, int, bytes]]:
    own = torch.frombuffer(bytearray(_WHERE.pack(host.encode(), port, token)), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own, group=group)
    told = []
    for where in found:
        host_bytes, port, token = _WHERE.unpack(where.numpy().tobytes())
        told.append((host_bytes.rstrip(b"\0").decode(), port, token))
    return told


def _call(rank: int, peer: int, index: int, where: tuple[str, int, bytes], deadline: float) -> socket.socket:
    host, port, token = where
    try:
        line = socket.create_connection((host, port), max(0.1, deadline - time.monotonic()))
        line.sendall(_GREETING.pack(token, rank, index))
    except OSError as error:
        raise RunError(f"rank {rank} cannot reach rank {peer} at {host}:{port}: {error}") from error
    return line


def _answer(
    server: socket.socket,
    token: bytes,
    names: Sequence[str],
    expected: Collection[tuple[int, str]],
    deadline: float,
) -> tuple[tuple[int, str], socket.socket]:
    """Return the next connection that an expected rank has opened; close others.

    Raises:
        TimeoutError: when none came before the deadline.
    """
    while True:
        server.settimeout(max(0.1, deadline - time.monotonic()))
        line, _ = server.accept()
        line.settimeout(GREETING_TIMEOUT_S)
        try:
            given, peer, index = _GREETING.unpack(receive_exactly(line, _GREETING.size))
        except OSError:
            line.close()
            continue
        known = secrets.compare_digest(given, token) and index < len(names)
        if known and (peer, names[index]) in expected:
            return (peer, names[index]), line
        line.close()


def receive_exactly(line: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    receive_into(line, memoryview(buffer))
    return bytes(buffer)


def receive_into(line: socket.socket, room: memoryview) -> None:
    """Fill `room` with the next bytes; blocks.

    Raises:
        ConnectionError: when the peer is gone.
        TimeoutError: when nothing came within the connection's timeout.
    """
    while room:
        try:
            count = line.recv_into(room, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError("nothing came in time") from error
        if not count:
            raise ConnectionError("the connection was closed by the other end")
        room = room[count:]


def send_all(line: socket.socket, content: memoryview) -> None:
    """Send everything; blocks while the peer does not read.

    Raises:
        ConnectionError: when the peer is gone.
        TimeoutError: when the peer took nothing within the connection's timeout.
    """
    try:
        line.sendall(content)
    except BlockingIOError as error:
        raise TimeoutError("nothing was taken in time") from error


def send_now(line: socket.socket, content: memoryview) -> int:
    """Send as many bytes as the system takes at once and return their number."""
    try:
        return line.send(content, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0


def _make_ready(line: socket.socket, timeout_s: float) -> None:
    """Set the options of a connection; a timeout of 0 is none."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        line.setsockopt(socket.IPPROTO_TCP, option, value)
    # Python's own timeout would cost one more system call per transfer.
    line.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
