"""The collectives of tensor ranks inside a layer."""

from __future__ import annotations

from weft.program.segments import border_kind

_STREAM = "tensor_collective"
TENSOR_FORWARD = border_kind("tensor_forward", "Tf", _STREAM, backward=False)
TENSOR_BACKWARD = border_kind("tensor_backward", "Tb", _STREAM, backward=True)
