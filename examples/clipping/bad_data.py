"""Clipped micro-batches beside their peers where some samples are bad: digits and text.

python bad_data.py [--quick] [--json]

- "digits": some training labels are wrong, under SGD and under Adam. Figures are accuracies on clean images.
- "text": some samples are random bytes. Figures are losses on clean text, in nats per byte.
- "suspects": how well the suppressed length of gradients finds bad samples, beside their norm and loss.
- "second source": nothing is bad, but a small part of the text is of another kind.

Each arm and each size of micro-batches has a learning rate of its own. It is the best of a grid on seeds and
held-out samples that are not reported. Grids grow while their best rate is at a border. Speech is not shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean

import torch
from arms import MIN, PLAIN, Arm, LeastNorm, StepRule, arms, require_as_weft
from bad_tasks import REPORTED, TUNING, BadTask, Digits, Text
from stacked_training import Seen, StackedTraining, Start
from suspects import EARLY, LATE, LOSS, NORM, SUPPRESSED, separations

BAD_TEXT, SECOND_SOURCE, BLOCK = 0.1, 0.05, 4
GROWTH, LARGEST_GROWTHS = 2.0, 4
WINDOW = 0.1
FIRST_TUNING_SEED = 1000


@dataclass(frozen=True)
class Effort:
    """The work of a study: steps, seeds that tune and that are reported, sizes, shares of wrong labels."""

    digits_steps: int
    text_steps: int
    digits_seeds: tuple[int, int]
    text_seeds: tuple[int, int]
    sizes: tuple[int, ...]
    medians: tuple[int, ...]
    wrong: tuple[float, ...]
    growths: int


FULL = Effort(1000, 400, (2, 5), (2, 4), (1, 2, 4, 8, 16), (4, 8), (0.0, 0.05, 0.1, 0.2), LARGEST_GROWTHS)
QUICK = Effort(80, 25, (1, 2), (1, 2), (1, 4), (4,), (0.0, 0.1), 0)


@dataclass
class Outcome:
    """What one arm reached: figures by name, one for each reported seed, and the grid of its rates.

    `areas` say how well scores find bad samples, by score and window.
    """

    arm: str
    bad: float
    rate: float
    tried: list[float]
    figures: dict[str, list[float]]
    areas: dict[str, list[float]] = field(default_factory=dict)

    @property
    def at_border(self) -> bool:
        return self.rate in (min(self.tried), max(self.tried))


def trained(
    task: BadTask, arm: Arm, starts: Sequence[Start], steps: int, block: int = 1
) -> tuple[StackedTraining, Seen]:
    training = StackedTraining(task, list(starts), arm.samples, block)
    return training, training.run(arm.make(), steps)


def tuned(
    task: BadTask, arm: Arm, bad: float, seeds: int, steps: int, growths: int, block: int
) -> tuple[float, list[float]]:
    """The best rate and all rates that were tried; a grid grows while its best one is at its border."""
    errors: dict[float, float] = {}
    new = list(task.rates)
    for growth in range(growths + 1):
        starts = [Start(rate, FIRST_TUNING_SEED + seed, bad) for rate in new for seed in range(seeds)]
        training, _ = trained(task, arm, starts, steps, block)
        figure = next(iter(training.held_out(TUNING).values()))
        found = task.error(figure).view(len(new), seeds).mean(1).nan_to_num(torch.inf)
        errors.update(zip(new, found.tolist(), strict=True))
        best = min(errors, key=errors.__getitem__)
        if growth == growths or min(errors) < best < max(errors):
            break
        new = [best * GROWTH, best * GROWTH**2] if best == max(errors) else [best / GROWTH, best / GROWTH**2]
    return best, sorted(errors)


def outcome(
    task: BadTask, arm: Arm, bad: float, seeds: tuple[int, int], steps: int, growths: int, block: int = 1
) -> Outcome:
    tuning, reported = seeds
    rate, tried = tuned(task, arm, bad, tuning, steps, growths, block)
    starts = [Start(rate, seed, bad) for seed in range(reported)]
    training, seen = trained(task, arm, starts, steps, block)
    figures = {name: figure.tolist() for name, figure in training.held_out(REPORTED).items()}
    if arm.name == PLAIN and bad:
        # The plain mean needs no gradients of samples. A second training observes them.
        _, seen = trained(task, arm._replace(samples=1), starts, steps, block)
    areas = separations(seen, WINDOW) if arm.name in (PLAIN, MIN) else {}
    return Outcome(arm.label, bad, rate, tried, figures, areas)


def study(task: BadTask, effort: Effort, bad: float, steps: int, seeds: tuple[int, int]) -> list[Outcome]:
    tried = arms(task.batch, effort.sizes, effort.medians, max(1, round(WINDOW * steps)))
    return [outcome(task, arm, bad, seeds, steps, effort.growths) for arm in tried]


def second_source(effort: Effort) -> list[Outcome]:
    """A clean second source: plain mean, and the least norm of all or of each source.

    In "blocks", micro-batches have samples of one source.
    """
    task = Text(SECOND_SOURCE)

    def own_bounds() -> StepRule:
        return LeastNorm(sources=2)

    cases: list[tuple[str, int, Callable[[], StepRule], int]] = [
        (PLAIN, task.batch, StepRule, 1),
        ("min, 1", 1, LeastNorm, 1),
        ("min, 1, own bounds", 1, own_bounds, 1),
        (f"min, {BLOCK}", BLOCK, LeastNorm, 1),
        (f"min, {BLOCK}, blocks", BLOCK, LeastNorm, BLOCK),
        (f"min, {BLOCK}, blocks, own bounds", BLOCK, own_bounds, BLOCK),
    ]
    return [
        outcome(task, Arm(name, size, make), 0.0, effort.text_seeds, effort.text_steps, effort.growths, block)
        for name, size, make, block in cases
    ]


def spread(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    low, middle, high = (f"{one:{sign}.{digits}f}" for one in (min(values), mean(values), max(values)))
    return f"{middle} ({low} to {high})"


def lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """A line for each arm: its figures, and their differences from the plain mean of the same seed."""
    plain = outcomes[0].figures
    for one in outcomes:
        border = ", at the border" if one.at_border else ""
        tried = f"rate {one.rate:g} of {one.tried[0]:g} to {one.tried[-1]:g}{border}"
        yield f"  {one.arm:<30} {tried}"
        for name, values in one.figures.items():
            gains = [value - base for value, base in zip(values, plain[name], strict=True)]
            yield f"    {name:<9} {spread(values)}   to plain {spread(gains, sign='+')}"


def area_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for one in outcomes:
        if one.areas:
            yield f"  {one.arm}"
        for place in (EARLY, LATE) if one.areas else ():
            scores = (
                f"{score} {spread(one.areas[f'{score} {place}'])}" for score in (SUPPRESSED, NORM, LOSS)
            )
            yield f"    {place:<6} {'  '.join(scores)}"


def main(quick: bool, as_json: bool) -> None:
    torch.set_num_threads(1)
    require_as_weft()
    effort = QUICK if quick else FULL
    tables: dict[str, list[Outcome]] = {}

    def done(name: str, outcomes: list[Outcome]) -> None:
        tables[name] = outcomes
        if as_json:
            return
        print(name, *lines(outcomes), sep="\n", flush=True)
        if any(one.areas for one in outcomes):
            print(f"suspects, {name}: area under the curve", *area_lines(outcomes), sep="\n", flush=True)

    for adaptive in (False, True):
        digits, optimizer = Digits(adaptive), "Adam" if adaptive else "SGD"
        for wrong in effort.wrong:
            found = study(digits, effort, wrong, effort.digits_steps, effort.digits_seeds)
            done(f"digits, {optimizer}, {wrong:.0%} wrong labels", found)
    text = Text()
    # How much garbage costs the plain mean: rules can gain no more than that.
    arm = Arm(PLAIN, text.batch, StepRule)
    done("text, no garbage", [outcome(text, arm, 0.0, effort.text_seeds, effort.text_steps, effort.growths)])
    found = study(text, effort, BAD_TEXT, effort.text_steps, effort.text_seeds)
    done(f"text, {BAD_TEXT:.0%} garbage", found)
    done(f"second source, {SECOND_SOURCE:.0%} sums", second_source(effort))
    if as_json:
        print(json.dumps({name: [asdict(one) for one in outcomes] for name, outcomes in tables.items()}))


if __name__ == "__main__":
    main("--quick" in sys.argv, "--json" in sys.argv)
