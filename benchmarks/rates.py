"""How fast gradients shrink with the number of steps T, beside what theorems say of their order in T.

Four workers in one process minimise f(x) = sum of x_j^2 / 2 + a (1 - cos(w x_j)), which is smooth and not
convex. Each draws its own Gaussian noise on the gradient, so gradients are unbiased with bounded variance.
Step sizes are those of the theorems: constant over a run, and of the order in T that they name. A theorem
gives an upper bound, so a slope that is steeper meets it.

- SGD, step 1 / sqrt(T): the mean of ||grad f||_2^2 is O(1 / sqrt(T)). Assumes a smooth f, bounded variance.
- SDP4Bit (arXiv 2410.15526), the same step: the same order. Assumes an unbiased quantiser of gradients with
  bounded variance, and one of weight differences that contracts. Codecs are weft's own.
- Sign momentum (arXiv 2411.17866) with SGD as the inner optimizer, the exact sign, a weight's step T^(-3/4)
  and 1 - beta = T^(-1/2): the mean of ||grad f||_1 is O(T^(-1/4)). T counts rounds of several local steps.
- The same with the randomised sign, whose mean is u / B, constant betas and a step B / sqrt(T): the mean of
  ||grad f||_2^2 is O(1 / sqrt(T)). Assumes |u_j| <= B, which is checked.

    python benchmarks/rates.py            # T up to 100,000, some minutes
    python benchmarks/rates.py --quick    # T up to 10,000
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from figures import Value
from harness import Report, quick_parser

from weft.methods.clan.options import ClanOptions
from weft.methods.clan.runtime.codecs import Draw, codec_of
from weft.randomness import counter_seed
from weft.sync.codecs.counter import Key
from weft.sync.codecs.quantiser import Quantiser, unsmooth_

WORKERS, SIZE, SEED = 4, 512, 3
WIDTH, WAVE = 0.8, 2.0
NOISE, START = 0.5, 3.0
LOCAL_STEPS = 4
BETA1, BETA2 = 0.95, 0.98
LENGTHS, QUICK_LENGTHS = (1_000, 10_000, 100_000), (1_000, 10_000)
# A fitted slope may be less steep than the theorem's by this.
TOLERANCE = 0.05
SMOOTHNESS = 1 + WIDTH * WAVE**2


def gradient(x: torch.Tensor) -> torch.Tensor:
    return x + WIDTH * WAVE * torch.sin(WAVE * x)


class Noise:
    """Noise of the workers' gradients, shape (workers, n), drawn in blocks of steps."""

    def __init__(self, *key: int | str) -> None:
        self._generator = torch.Generator().manual_seed(counter_seed(SEED, *key) % 2**63)
        self._blocks = self._drawn()

    def _drawn(self) -> Iterator[torch.Tensor]:
        while True:
            yield from NOISE * torch.randn(64, WORKERS, SIZE, generator=self._generator)

    def next(self) -> torch.Tensor:
        return next(self._blocks)


# Yields the points whose gradients the theorem bounds, without end.
Points = Iterator[torch.Tensor]


def start() -> torch.Tensor:
    return START * torch.linspace(-1, 1, SIZE)


def sgd(length: int, noise: Noise) -> Points:
    x, rate = start(), 1 / (SMOOTHNESS * math.sqrt(length / LENGTHS[0]))
    while True:
        yield x
        x = x - rate * (gradient(x) + noise.next().mean(0))


def sdp4bit(length: int, noise: Noise) -> Points:
    """Quantised gradients step x; all workers compute at w, which gets the quantised change from w to x."""
    x, rate = start(), 1 / (SMOOTHNESS * math.sqrt(length / LENGTHS[0]))
    w, step = x.clone(), 0
    gradients, change = Quantiser(bits=4, group=128, smooth=True), Quantiser(bits=4, group=2048)
    payloads = torch.empty(WORKERS, gradients.payload_bytes(SIZE), dtype=torch.uint8)
    sent, total = torch.empty(change.payload_bytes(SIZE), dtype=torch.uint8), torch.empty(SIZE)
    while True:
        yield w
        shares = (gradient(w) + noise.next()) / WORKERS
        for worker, (share, payload) in enumerate(zip(shares, payloads, strict=True)):
            gradients.encode(share, payload, Key.of(SEED, "gradient", step, worker))
        gradients.decode_sum(payloads, total)
        unsmooth_(total)
        x -= rate * total
        change.encode_difference(x, w, sent, Key.of(SEED, "weights", step))
        change.decode(sent, total)
        w += total
        step += 1


def clan(length: int, noise: Noise) -> Points:
    """Encoded gradients and their encoded sum step x; workers and the owner of the sum keep errors."""
    # Errors reach x late, so that a step as long as that of SGD overshoots.
    x, rate = start(), 0.25 / (SMOOTHNESS * math.sqrt(length / LENGTHS[0]))
    table = ClanOptions(codec="scaled-sign", block=32)
    codec, draw = codec_of(table), Draw(Key.of(SEED, "own"), Key.of(SEED, "common"))
    errors, owned = torch.zeros(WORKERS, SIZE), torch.zeros(1, SIZE)

    def coded(numbers: torch.Tensor) -> torch.Tensor:
        blocks = numbers.view(-1, table.block)
        payload = torch.empty(table.payload_bytes(len(blocks)), dtype=torch.uint8)
        codec.encode(blocks, blocks.numel(), payload, draw)
        decoded = torch.empty_like(blocks)
        codec.decode(payload, decoded, draw)
        return decoded.view_as(numbers)

    while True:
        yield x
        numbers = errors + (gradient(x) + noise.next()) / WORKERS
        sent = coded(numbers)
        errors = numbers - sent
        total = sent.sum(0, keepdim=True) + owned
        found = coded(total)
        owned = total - found
        x = x - rate * found[0]


def mean_way(x: torch.Tensor, rate: float, noise: Noise) -> torch.Tensor:
    """The mean gradient of a round: all workers take local steps of SGD from x."""
    local = x.expand(WORKERS, SIZE)
    for _ in range(LOCAL_STEPS):
        local = local - rate * (gradient(local) + noise.next())
    return (x - local.mean(0)) / rate


def exact_sign(length: int, noise: Noise) -> Points:
    x, momentum, rounds = start(), torch.zeros(SIZE), length / LENGTHS[0]
    step, beta = 0.03 * rounds**-0.75, 1 - 0.1 * rounds**-0.5
    while True:
        yield x
        momentum = beta * momentum + (1 - beta) * mean_way(x, step, noise)
        x = x - step * momentum.sign()


def random_sign(length: int, noise: Noise) -> Points:
    x, momentum, rounds = start(), torch.zeros(SIZE), length / LENGTHS[0]
    # No gradient is larger than this by more than noise.
    bound = LOCAL_STEPS * (START + WIDTH * WAVE + 4 * NOISE)
    rate, number = 0.005 / math.sqrt(rounds), 0
    generator = torch.Generator().manual_seed(SEED)
    while True:
        yield x
        way = mean_way(x, rate / LOCAL_STEPS, noise)
        u = BETA1 * momentum + (1 - BETA1) * way
        momentum = BETA2 * momentum + (1 - BETA2) * way
        if u.abs().max() > bound:
            raise SystemExit(f"round {number}: a direction is larger than {bound}, which the theorem assumes")
        kept = torch.rand(SIZE, generator=generator) < 0.5 + u.abs() / (2 * bound)
        x = x - rate / LOCAL_STEPS * bound * torch.where(kept, u.sign(), -u.sign())
        number += 1


def squared(found: torch.Tensor) -> float:
    return float(found.square().sum())


def absolute(found: torch.Tensor) -> float:
    return float(found.abs().sum())


@dataclass(frozen=True)
class Theorem:
    """An algorithm, the size of a gradient whose mean over its steps falls as T^`order`, and its words."""

    name: str
    points: Callable[[int, Noise], Points]
    size: Callable[[torch.Tensor], float]
    order: float


THEOREMS = (
    Theorem("SGD, squared l2", sgd, squared, -0.5),
    Theorem("SDP4Bit, squared l2", sdp4bit, squared, -0.5),
    Theorem("CLAN with scaled signs, squared l2", clan, squared, -0.5),
    Theorem("exact sign momentum, l1", exact_sign, absolute, -0.25),
    Theorem("random sign momentum, squared l2", random_sign, squared, -0.5),
)


def mean_size(theorem: Theorem, length: int) -> float:
    points = theorem.points(length, Noise(theorem.name, length))
    return math.fsum(theorem.size(gradient(next(points))) for _ in range(length)) / length


def options() -> argparse.ArgumentParser:
    return quick_parser(__doc__)


def main() -> None:
    asked = options().parse_args()
    report = Report("rates", asked)
    report.print_machine()
    torch.set_num_threads(1)
    lengths = QUICK_LENGTHS if asked.quick else LENGTHS
    for theorem in THEOREMS:
        cells = [f"{theorem.name}, {length:,} steps" for length in lengths]
        for cell, length in zip(cells, lengths, strict=True):
            if report.missing(cell):
                report.add(cell, Value(mean_size(theorem, length), "ratio"))
        sizes = [report.value(cell) for cell in cells]
        slope = float(np.polyfit(np.log(lengths), np.log(sizes), 1)[0])
        report.add(f"{theorem.name}, slope", Value(slope, "ratio", theorem.order + TOLERANCE))


if __name__ == "__main__":
    main()
