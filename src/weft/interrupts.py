"""Ctrl-C that ends a program in one line and with exit code 130, wherever it is.

This module imports little, because Ctrl-C prints a traceback until `end_on_interrupt` is called.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130
# Until Python has left a destructor or callback.
_REPEATED_AFTER_S = 0.01


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process at once, outside `interruptible` blocks.

    Imports and the interpreter's own exit would answer a KeyboardInterrupt with a traceback. A program that
    was started with SIGINT ignored goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
        sys.unraisablehook = _repeat_interrupt


class interruptible:  # noqa: N801  # as the context managers of contextlib, whose import takes long
    """A block in which Ctrl-C raises KeyboardInterrupt, so that its work cleans up."""

    def __enter__(self) -> None:
        self._ended = signal.getsignal(signal.SIGINT) is _end
        if self._ended:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self._ended:
            signal.signal(signal.SIGINT, _end)


def _end(signal_number: int, frame: object) -> None:
    os.write(2, b"weft: interrupted\n")
    os._exit(INTERRUPTED)


def _repeat_interrupt(lost: sys.UnraisableHookArgs) -> None:
    """Raise an interrupt again that came in a destructor or callback, where Python drops exceptions."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    from threading import Timer, get_ident

    # A signal, unlike a flag, also wakes a thread that waits.
    Timer(_REPEATED_AFTER_S, signal.pthread_kill, (get_ident(), signal.SIGINT)).start()
