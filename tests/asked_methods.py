"""Methods that jobs of tests ask for. No torch here."""

from __future__ import annotations

from weft.describe.plan import GRADIENT_NORM, Choice

CLIPS = (Choice(name=GRADIENT_NORM),)
