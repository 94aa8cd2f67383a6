"""The moves that make collectives inside layers instructions of the program."""

from __future__ import annotations

from weft.methods.tensor_collectives.program import CUTTER

_CUT = "Passes are cut where tensor ranks exchange, and what they exchange is an instruction"
_SOURCE = "Shoeybi et al., Megatron-LM, arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198"
MOVES = tuple(
    CUTTER.move(way, name, f"{_CUT}{beside}.", _SOURCE)
    for way, name, beside in (
        ("instructions", "run tensor collectives between segments", ""),
        ("overlapped", "overlap tensor collectives", ", beside which gradients of weights are computed"),
        ("interleaved", "interleave micro-batches", ", beside which another micro-batch computes"),
    )
)
