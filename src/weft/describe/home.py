"""The folder of weft's measurements on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def weft_home() -> Path:
    """Return ``$WEFT_HOME``, else ``weft`` in the user's configuration folder; it need not exist yet."""
    given = os.environ.get("WEFT_HOME")
    if given:
        return Path(given).expanduser()
    # The XDG base directory specification ignores relative paths.
    configuration = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (configuration if configuration.is_absolute() else Path.home() / ".config") / "weft"
