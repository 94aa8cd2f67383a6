"""Help on one screen: the options of groups of its own are names alone, unless `--help-all` asks for all."""

from __future__ import annotations

from cyclopts.help import DefaultFormatter, HelpPanel
from rich.console import Console, ConsoleOptions
from rich.text import Text

HELP_ALL = "--help-all"
# What most people need stands in cyclopts' own groups. A command puts the rest into groups of its own.
_EXPLAINED = ("Arguments", "Parameters", "Commands")


class ShortHelp(DefaultFormatter):
    """Help that explains cyclopts' own groups of options; of a command's further groups, it has the names."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one group of options."""
        if panel.title in _EXPLAINED:
            super().__call__(console, options, panel)
            return
        title = (f"{panel.title} ({HELP_ALL} explains them): ", "bold")
        names = Text(", ").join(Text(name, "cyan") for entry in panel.entries for name in entry.names[:1])
        console.print(Text.assemble(title, names))
