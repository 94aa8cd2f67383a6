"""The exchanges of expert ranks: rows to their experts, results back, and the gradients of both."""

from __future__ import annotations

from weft.program.segments import border_kind

_STREAM = "expert_exchange"
# Also gathers the counts of rows, which the other three reuse.
EXPERT_DISPATCH = border_kind("expert_dispatch", "Xd", _STREAM, backward=False)
EXPERT_COMBINE = border_kind("expert_combine", "Xc", _STREAM, backward=False)
# Gradients of results go to the experts; those of rows come back.
EXPERT_COMBINE_BACKWARD = border_kind("expert_combine_backward", "Yc", _STREAM, backward=True)
EXPERT_DISPATCH_BACKWARD = border_kind("expert_dispatch_backward", "Yd", _STREAM, backward=True)
