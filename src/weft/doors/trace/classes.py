"""Classes of kernels and operators by name, and the shown form of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from weft.program.kinds import all_kinds

CLASSES = ("matmul", "attention", "collective", "memory copy", "other")
MATMUL, ATTENTION, COLLECTIVE, COPY, OTHER = range(len(CLASSES))

# The order counts: a fused attention kernel may have the name of its first product.
_PATTERNS: tuple[tuple[int, re.Pattern[str]], ...] = (
    (
        COLLECTIVE,
        re.compile(
            r"nccl|rccl|gloo:|mpi:|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|c10d::",
            re.IGNORECASE,
        ),
    ),
    (
        ATTENTION,
        re.compile(
            r"flash|fmha|attention|attn|sdp[ab]|mha_|_mha|cudnn_generated_fort_native_sdpa", re.IGNORECASE
        ),
    ),
    (
        MATMUL,
        re.compile(
            r"gemm|matmul|cutlass|cublas|nvjet|ampere_.*(16816|1688|sgemm)|sm\d+_xmma|cijk_|conv|wgrad|dgrad|"
            r"::(add|b|ba)?mm$|::addmm|::linear$|bmm",
            re.IGNORECASE,
        ),
    ),
    (COPY, re.compile(r"memcpy|memset|copy_?kernel|::copy_$|::_to_copy$", re.IGNORECASE)),
)


@cache
def _categories() -> Mapping[str, int]:
    """Return classes by category: weft's traces name an instruction's kind; messages are collective."""
    found = {kind.name: MATMUL if kind.stream == "compute" else COLLECTIVE for kind in all_kinds()}
    return {**found, "free": OTHER, "step": OTHER, "gpu_memcpy": COPY, "gpu_memset": COPY}


def class_of(event: Mapping[str, Any]) -> int:
    """Return the class of an event: by its category if that decides it, else by its name."""
    known = _categories().get(str(event.get("cat")))
    return classified(event["name"]) if known is None else known


@cache
def classified(name: str) -> int:
    """Return the class of a kernel or an operator by its name."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)


def shown_name(name: str, most: int = 60) -> str:
    """Return a kernel's name without its template's arguments, cut where it is long."""
    short = re.sub(r"<.*", "", name.removeprefix("void ")) or name
    return short if len(short) <= most else f"{short[: most - 3]}..."
