"""Optimizers in other stacks' files: which of them keep and move the bytes of AdamW."""

from __future__ import annotations

import re

# AdamW and Adam in any implementation keep two states in fp32; words are those of torch, transformers,
# DeepSpeed and Megatron-LM.
_ADAM = re.compile(r"(fused_?)?adam_?w?(_torch|_hf|_apex)?(_fused|_xla)?")


def other_optimizer(key: str, name: object) -> list[str]:
    """Return one line for an optimizer with other states than AdamW's two; none for AdamW and for no name."""
    if name in (None, "", "auto") or _ADAM.fullmatch(str(name).lower()):
        return []
    return [f"{key} {name}: states of other sizes than AdamW's are not modelled here"]
