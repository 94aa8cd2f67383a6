"""A comparison of two paths of the quantiser, bit by bit.

    python tests/sync/codecs/path_bits.py

compares the kernels with the plain path: on a GPU, or with TRITON_INTERPRET=1 on a CPU.
"""

from __future__ import annotations

import itertools
import math
import os

import torch

from weft.sync.codecs.counter import Key
from weft.sync.codecs.path import CodecPath
from weft.sync.codecs.quantiser import Quantiser
from weft.sync.codecs.reference import ReferencePath

KEY = Key.of(11, "paths")
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Neighbours of the borders of blocks, groups and tiles.
LENGTHS = (0, 1, 33, 1023, 2048, 4097)


def mixed_numbers(length: int, seed: int) -> torch.Tensor:
    """Numbers of all magnitudes, with groups of zeros and some that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-140, 120, (length // 64 + 1,), generator=generator)
    numbers = torch.randn(length, generator=generator).double()
    numbers *= 2.0 ** exponents.double().repeat_interleave(64)[:length]
    numbers[length // 3 : length // 2] = 0
    numbers[length // 2 : length // 2 + 2] = torch.tensor([math.inf, math.nan])[: length - length // 2]
    return numbers.float()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are equal, of any two NaNs."""
    if one.is_floating_point():
        return torch.equal(one.isnan(), other.isnan()) and torch.equal(
            one.nan_to_num().view(torch.int32), other.nan_to_num().view(torch.int32)
        )
    return torch.equal(one, other)


def compare(
    path: CodecPath, form: Quantiser, values: torch.Tensor, first: int, group_of_sums: int | None = None
) -> None:
    """Fail unless `path` encodes, decodes and adds up as the plain path does."""
    plain, length = ReferencePath(), len(values)
    payloads = [_payload(form, length, values.device, filled) for filled in (0, 255)]
    for one, payload in zip((plain, path), payloads, strict=True):
        one.encode(form, values, payload, KEY, first)
    assert same(*payloads), form
    received = torch.stack([payloads[0]] * 3)
    totals = [values.new_empty(length, dtype=torch.float32) for _ in range(2)]
    for one, total in zip((plain, path), totals, strict=True):
        one.decode_sum(form, received, total)
    assert same(*totals), form
    again = Quantiser(bits=12 - form.bits, group=group_of_sums or form.group, stochastic=form.stochastic)
    sums = [_payload(again, length, values.device, filled) for filled in (0, 255)]
    for one, payload in zip((plain, path), sums, strict=True):
        one.encode_sum(again, received, form, length, payload, KEY, first)
    assert same(*sums), form


def compare_differences(
    path: CodecPath, form: Quantiser, target: torch.Tensor, weights: torch.Tensor
) -> None:
    """Fail unless `path` encodes a difference as the plain path does."""
    payloads = [_payload(form, len(target), target.device, filled) for filled in (0, 255)]
    for one, payload in zip((ReferencePath(), path), payloads, strict=True):
        one.encode_difference(form, target, weights, payload, KEY, 3)
    assert same(*payloads), weights.dtype


def compare_smoothing(path: CodecPath, values: torch.Tensor) -> None:
    """Fail unless `path` transforms as the plain path does."""
    one, other = values.clone(), values.clone()
    ReferencePath().smooth_(one)
    path.smooth_(other)
    assert same(one, other), len(values)


def _payload(form: Quantiser, length: int, device: torch.device, filled: int) -> torch.Tensor:
    return torch.full((form.payload_bytes(length),), filled, dtype=torch.uint8, device=device)


def main() -> None:
    """Compare the kernels, in few programs and on few numbers: the interpreter is slow."""
    from weft.sync.codecs.kernels import TritonPath

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device, path = "cpu" if interpreted else "cuda", TritonPath()
    for bits, group, smooth in itertools.product((4, 8), (96, 128, 2048), (False, True)):
        for length in LENGTHS:
            form = Quantiser(bits=bits, group=group, smooth=smooth, stochastic=length != 33)
            first = 2**32 - 100 if length == 1023 else length
            compare(path, form, mixed_numbers(length, bits).to(device), first)
    for kind in KINDS:
        form = Quantiser(bits=4, group=128)
        compare(path, form, mixed_numbers(300, 5).to(device, kind), 0, group_of_sums=64)
        # The interpreter cuts numbers to bf16 where a GPU rounds them: these differences are exact.
        weights = torch.arange(300, device=device) % 64
        target = weights * 2 + 1.0
        if not interpreted or kind != torch.bfloat16:
            target += 0.3
        compare_differences(path, form, target, weights.to(kind))
    for length in LENGTHS:
        compare_smoothing(path, mixed_numbers(length, 3).to(device))


if __name__ == "__main__":
    main()
