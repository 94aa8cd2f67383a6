"""The bytes that plain torch moves for a value, from which unfused codecs of accelerators are priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.predict.cost.codec_times import UNFUSED_BYTES
from weft.sync.codecs.counter import Key
from weft.sync.codecs.quantiser import Quantiser
from weft.sync.codecs.reference import ReferencePath

ELEMENTS = 1 << 14


class MovedBytes(TorchDispatchMode):
    """Counts the bytes that operations read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            tensors = (one for one in tree_leaves((args, kwargs, found)) if isinstance(one, torch.Tensor))
            self.moved += sum(one.numel() * one.element_size() for one in tensors)
        return found


def test_plain_torch_moves_the_priced_bytes() -> None:
    form, path, values = Quantiser(bits=4, group=128, smooth=True), ReferencePath(), torch.randn(ELEMENTS)
    payload = torch.zeros(form.payload_bytes(ELEMENTS), dtype=torch.uint8)
    with MovedBytes() as encoding:
        path.encode(form, values, payload, Key.of(0, "traffic"), 0)
    with MovedBytes() as decoding:
        path.decode_sum(form, payload[None], torch.empty(ELEMENTS))
    found = [one.moved / ELEMENTS for one in (encoding, decoding)]
    assert found == pytest.approx(UNFUSED_BYTES, rel=0.05)
