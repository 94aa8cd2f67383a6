"""SIGTERM as an exception, for a while."""

from __future__ import annotations

import signal
import threading

import pytest

from weft.signals import terminable


def test_sigterm_ends_the_block_and_its_old_handler_returns() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop, terminable():
        signal.raise_signal(signal.SIGTERM)
    assert stop.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found: list[object] = []

    def inside() -> None:
        with terminable():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [before]
