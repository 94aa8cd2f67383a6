"""Attention of each token to the window of tokens before it, chosen block by block."""

from __future__ import annotations

from weft.bundles import Bundle
from weft.methods.attention_window.costs import OPTION
from weft.methods.attention_window.options import NAME, TABLE
from weft.methods.attention_window.rules import RULES

BUNDLE = Bundle(name=NAME, parts=(OPTION, TABLE, *RULES), runtime="weft.methods.attention_window.runtime")
