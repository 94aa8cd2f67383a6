"""Connections between ranks: who is let in, who is missing, and at which address one is found."""

from __future__ import annotations

import socket
import threading

import psutil
import pytest
from pool import WorkerPool

from weft.errors import InputError, RunError
from weft.run.transport import connections
from weft.run.transport.connections import connect, own_address, receive_exactly, require_reachable, send_all


def talk(rank: int, ranks: int) -> list[bytes]:
    """Every pair of three ranks has two connections; each end says who it is on which."""
    names = ("first", "second")
    found = connect(set(range(ranks)) - {rank}, names, 30.0)
    assert set(found) == {(peer, name) for peer in range(ranks) if peer != rank for name in names}
    for (peer, name), line in found.items():
        send_all(line, memoryview(f"{rank}{peer}{name[0]}".encode()))
    heard = []
    for key in sorted(found):
        heard.append(receive_exactly(found[key], 3))
        found[key].close()
    return heard


@pytest.mark.processes
def test_every_pair_is_connected_by_name(worker_pool: WorkerPool) -> None:
    for rank, heard in enumerate(worker_pool.run(talk, ranks=3)):
        peers = [peer for peer in range(3) if peer != rank]
        assert heard == [f"{peer}{rank}{letter}".encode() for peer in peers for letter in "fs"]


def stay_away(rank: int, ranks: int) -> str:
    """Rank 0 waits for rank 1, which believes that it has no peers; a stranger calls meanwhile."""
    if rank == 1:
        connect((), ("only",), 5.0)
        return ""
    listening = threading.Event()
    create_server = socket.create_server
    calls: list[threading.Thread] = []

    def watched(*arguments: object, **options: object) -> socket.socket:
        server = create_server(*arguments, **options)  # type: ignore[arg-type]
        where = server.getsockname()

        def call() -> None:
            with socket.create_connection(where) as line:
                line.sendall(b"x" * 64)
                # Hung up on, instead of let in.
                assert receive_end(line)
                listening.set()

        calls.append(threading.Thread(target=call))
        calls[0].start()
        return server

    connections.socket.create_server = watched
    try:
        with pytest.raises(RunError) as caught:
            connect({1}, ("only",), 1.0)
    finally:
        connections.socket.create_server = create_server
    calls[0].join()
    assert listening.is_set()
    return str(caught.value)


def meet_a_stranger(rank: int, ranks: int, forged: bool, peer: int, purpose: int) -> bool:
    """Whether rank 0, which waits for rank 1 and purpose 0, lets in the stranger, who greets as `peer`."""
    if rank == 0:
        try:
            found = connect({1}, ("only",), 2.0)
        except RunError:
            return False
        found[1, "only"].close()
        return True
    with socket.create_server((own_address(), 0)) as own:
        host, port, token = connections._tell_all(*own.getsockname()[:2], bytes(16))[0]
    if forged:
        token = bytes([token[0] ^ 1]) + token[1:]
    with socket.create_connection((host, port)) as line:
        line.sendall(connections._GREETING.pack(token, peer, purpose))
        return receive_end(line)


def receive_end(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.processes
def test_strangers_are_not_let_in_and_who_is_missing_is_named(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(stay_away, ranks=2)[0] == "rank 0: ranks 1 did not connect within 1 s"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("greeting", "enters"),
    [
        pytest.param((False, 1, 0), True, id="right"),
        pytest.param((True, 1, 0), False, id="another token"),
        pytest.param((False, 0, 0), False, id="a rank that nobody waits for"),
        pytest.param((False, 1, 1), False, id="a purpose that there is not"),
    ],
)
def test_a_stranger_who_knows_all_but_one_thing_is_not_let_in(
    worker_pool: WorkerPool, greeting: tuple[bool, int, int], enters: bool
) -> None:
    assert worker_pool.run(meet_a_stranger, *greeting, ranks=2) == [enters, True]


def test_ranks_of_several_machines_need_addresses_that_lead_to_them() -> None:
    require_reachable(["127.0.0.1", "127.0.0.1"])
    require_reachable(["10.0.0.1", "10.0.0.2"])
    with pytest.raises(InputError, match=r"other ranks cannot reach 127\.0\.1\.1, the address of rank 0"):
        require_reachable(["127.0.1.1", "10.0.0.2"])


def test_the_address_is_on_the_interface_named_or_on_the_way_to_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, address = next(
        (name, one.address)
        for name, found in psutil.net_if_addrs().items()
        for one in found
        if one.family == socket.AF_INET
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    assert own_address() == address
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    with pytest.raises(InputError, match="GLOO_SOCKET_IFNAME: 'no-such-one' has no IPv4 address"):
        own_address()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    assert own_address() == "127.0.0.1"
