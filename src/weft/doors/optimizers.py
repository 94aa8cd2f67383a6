"""Optimizers in other stacks' files: the bytes of states that they keep and move."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weft.describe.optimizers import ADAMW, FOREACH_ADAMW, MOMENTUM_SGD, OptimizerWork

# Words are those of torch, transformers, DeepSpeed and Megatron-LM: two states in fp32, in any implementation
# of Adam; two of one byte or of half a byte (Dettmers et al., arXiv 2110.02861) with few scales; and one.
_WORKS: Mapping[re.Pattern[str], OptimizerWork] = {
    # By default torch's own class runs over lists of tensors on a GPU.
    re.compile(r"adamw?_torch"): FOREACH_ADAMW,
    re.compile(r"(paged_)?(fused_?)?adam_?w?(_torch|_hf|_apex|_32bit)?(_fused|_xla)?"): ADAMW,
    re.compile(r"(paged_)?adamw?(_bnb|_torch)?_8bit"): OptimizerWork(state_bytes=2, elementwise=True),
    re.compile(r"adamw?_torch_4bit"): OptimizerWork(state_bytes=1, elementwise=True),
    re.compile(r"(paged_)?lion(_32bit)?"): MOMENTUM_SGD,
    re.compile(r"(paged_)?lion_8bit"): OptimizerWork(state_bytes=1, elementwise=True),
}


def known_or_adamw(name: object) -> OptimizerWork:
    """Return the work of an optimizer; AdamW's for unknown ones and where no name is given."""
    return _work(name) or ADAMW


def in_torch(name: object, *, foreach: bool) -> OptimizerWork:
    """Return the work of an optimizer; torch's own class may run it over lists of tensors."""
    work = known_or_adamw(name)
    return FOREACH_ADAMW if foreach and work == ADAMW else work


def other_optimizer(key: str, name: object) -> list[str]:
    """Return one line for an optimizer with unknown states."""
    known = name in (None, "", "auto") or _work(name) is not None
    return [] if known else [f"{key} {name}: the sizes of its states are not modelled here"]


def paged_optimizer(key: str, name: object) -> list[str]:
    """Return one line for states that may move to host memory."""
    paged = str(name).lower().startswith("paged_")
    return [f"{key} {name}: predicted with all states on the devices"] if paged else []


def _work(name: object) -> OptimizerWork | None:
    return next((work for words, work in _WORKS.items() if words.fullmatch(str(name).lower())), None)
