"""Network interfaces of a node: the one that its sockets use, and its address."""

from __future__ import annotations

import os
import socket

import psutil

from weft.errors import InputError, Violation

# The variables by which the libraries of collectives know the interface; weft's own sockets follow gloo's.
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def address_of(interface: str, where: str) -> str:
    """Return the IPv4 address of an interface of this machine.

    Raises:
        InputError: at `where`, if it has none.
    """
    known = psutil.net_if_addrs()
    addresses = [one.address for one in known.get(interface, []) if one.family == socket.AF_INET]
    if not addresses:
        raise InputError(Violation(where, f"{interface!r} has no IPv4 address", ", ".join(sorted(known))))
    return str(addresses[0])


def take_interface(interface: str) -> None:
    """Have all sockets of this process that open from now on use an interface, unless variables name one.

    Raises:
        InputError: names this host, if the interface has no IPv4 address.
    """
    address_of(interface, f"{socket.gethostname()}: node.interface")
    for name in (GLOO_INTERFACE, NCCL_INTERFACE):
        os.environ.setdefault(name, interface)
