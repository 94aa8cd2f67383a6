"""Interfaces: sockets use the stated one, and a name without an address is refused."""

from __future__ import annotations

import os
import socket

import pytest

from weft.errors import InputError
from weft.run.launch.interfaces import GLOO_INTERFACE, NCCL_INTERFACE, address_of, take_interface
from weft.run.transport.connections import own_address


def test_sockets_use_the_stated_interface_unless_variables_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv(NCCL_INTERFACE, "eth9")
    monkeypatch.setenv(GLOO_INTERFACE, "")
    monkeypatch.delenv(GLOO_INTERFACE)
    take_interface("lo")
    assert (os.environ[GLOO_INTERFACE], os.environ[NCCL_INTERFACE]) == ("lo", "eth9")
    assert own_address() == address_of("lo", "") == "127.0.0.1"


def test_an_interface_without_an_address_is_refused_with_those_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    with pytest.raises(InputError) as refused:
        take_interface("eth7")
    assert str(refused.value).startswith(
        f"{socket.gethostname()}: node.interface: 'eth7' has no IPv4 address"
    )
    assert "lo" in refused.value.violations[0].nearest.split(", ")
    assert GLOO_INTERFACE not in os.environ
