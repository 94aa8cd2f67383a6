"""Communication without overlap with computation, as other frameworks ship it."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.blocking import program

BUNDLE = Bundle(name=program.NAME, parts=(program.PASS,))
