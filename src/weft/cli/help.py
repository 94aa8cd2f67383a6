"""Help on one screen: first sentences, and names alone of what few need; `--help-all` has the rest."""

from __future__ import annotations

import re

from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

HELP_ALL = "--help-all"
# What most people need stands in cyclopts' own groups. A command puts the rest into groups of its own.
_EXPLAINED = ("Arguments", "Parameters", "Commands")
_SENTENCE_END = re.compile(r"(?<=\S)[.;](?:\s|$)")


class ShortHelp(DefaultFormatter):
    """Help with a first sentence for each option of cyclopts' own groups, and the names of all others."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one group of options."""
        if not panel.entries:
            return
        if panel.title in _EXPLAINED:
            table = Table.grid(padding=(0, 2))
            table.add_column(style="cyan", no_wrap=True)
            for entry in panel.entries:
                words = "".join(part.text for part in console.render(entry.description, options))
                name = " ".join(entry.display_labels_with_metavar)
                table.add_row(name, Text(_first_sentence(words, entry)))
            console.print(table, "")
            return
        title = (f"{panel.title} ({HELP_ALL}): ", "bold")
        names = Text(", ").join(Text(name, "cyan") for entry in panel.entries for name in entry.names[:1])
        console.print(Text.assemble(title, names))


def _first_sentence(words: str, entry: HelpEntry) -> str:
    """Return the first sentence of a description, or its part before a semicolon, and a default."""
    first = _SENTENCE_END.split(" ".join(words.split()), maxsplit=1)[0]
    return first if entry.default is None else f"{first} [{entry.default}]"
