"""The moves that make exchanges of expert ranks instructions of the program."""

from __future__ import annotations

from weft.methods.expert_exchanges.program import CUTTER

_CUT = "Passes are cut before the experts of a mixture and behind them, and their exchanges are instructions"
_SOURCE = "Lepikhin et al., GShard, arXiv 2006.16668; DeepSeek-V3, arXiv 2412.19437, section 3.2.1"
MOVES = tuple(
    CUTTER.move(way, name, f"{_CUT}{beside}.", _SOURCE)
    for way, name, beside in (
        ("instructions", "run expert exchanges between segments", ""),
        (
            "interleaved",
            "interleave micro-batches between experts",
            ", beside which another micro-batch computes",
        ),
    )
)
