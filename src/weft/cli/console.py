"""The console of all commands."""

from __future__ import annotations

from rich.console import Console


class PipeConsole(Console):
    """A console that reports a closed pipe as `print` does."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError again."""
        raise
