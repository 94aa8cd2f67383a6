"""Communication without overlap with computation, as other frameworks ship it."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.blocking import program
from weft.methods.blocking.moves import COMPOSITIONS

BUNDLE = Bundle(name=program.NAME, parts=(program.PASS, *COMPOSITIONS))
