"""The runtime of CLAN: codecs, exchanges, handlers, and the state of a rank's pieces."""

from __future__ import annotations

from weft.methods.clan.options import NAME
from weft.methods.clan.runtime.exchange import TwoWaySums
from weft.methods.clan.runtime.handlers import HANDLERS
from weft.methods.clan.runtime.state import state_of
from weft.run.methods import StateOf
from weft.sync.base import SynchroniserOf

PARTS = (*HANDLERS, StateOf(method=NAME, make=state_of), SynchroniserOf(name=NAME, make=TwoWaySums))
