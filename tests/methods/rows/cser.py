"""Rows of CSER: one process steps a model for each replica, and averages the same blocks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from equality_table import Row
from methods.rows.gradient_norm import Clips
from methods.rows.local_averaging import GPT, LLAMA, TIED
from one_process import Copy, Method, Told
from small_jobs import SEED
from small_plans import make_plan

from weft.describe.plan import Choice
from weft.methods.cser.blocks import Blocks
from weft.methods.cser.options import DISAGREEMENT, STALEST, CserOptions
from weft.methods.cser.runtime.compressors import BlockCompressor
from weft.methods.local_averaging.options import LEFT_OUT
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage


@dataclass
class ReplayedPart:
    """The parameters of one part by name, the former weights and the errors, shape (replicas, n).

    `met_at` has, by replica and block, the steps done when a mean last took up its error.
    """

    names: list[str]
    former: torch.Tensor
    errors: torch.Tensor
    met_at: torch.Tensor


@dataclass
class Replay:
    """The parts of every stage, and what the last reset tells."""

    stages: list[list[ReplayedPart]]
    told: dict[str, float]


@dataclass(frozen=True)
class Resets(Method):
    """CSER with the options `given`, for pipelines of `pp` stages of equal length."""

    given: tuple[tuple[str, Any], ...]
    pp: int = 1
    by_replica = True

    @property
    def options(self) -> CserOptions:
        return CserOptions(**dict(self.given))

    @property
    def sync(self) -> Choice:
        return Choice(name="cser", options=dict(self.given))

    @torch.no_grad()
    def begin(self, copies: Sequence[Copy]) -> Replay:
        config = copies[0].training.model
        stages = [
            [name for name, _ in build_stage(config, stage.layers, SEED, torch.float32).named_parameters()]
            for stage in make_plan(config, pp=self.pp).stages
        ]
        everywhere = [name for name in stages[0] if all(name in names for names in stages)]
        shared = everywhere if self.pp > 1 else []
        parts = [
            [[name for name in names if name not in shared], *([name] for name in shared)] for names in stages
        ]
        return Replay([[self._part(copies, names) for names in one] for one in parts], {})

    def _part(self, copies: Sequence[Copy], names: list[str]) -> ReplayedPart:
        weights = flat(copies, names)
        blocks = self._blocks(weights)
        met_at = torch.zeros(len(copies), blocks.count)
        return ReplayedPart(names, weights, torch.zeros_like(weights), met_at)

    def _blocks(self, weights: torch.Tensor) -> Blocks:
        return Blocks.of(weights.shape[1], self.options.ratios.largest, self.options.block)

    @torch.no_grad()
    def after_step(self, copies: Sequence[Copy], step: int, begun: Replay) -> None:
        shares = torch.tensor([copy.share for copy in copies], dtype=torch.float64)[:, None]
        every, variant = self.options.ratios.every, self.options.variant
        resets = self.options.ratios.reset is not None and (step + 1) % every == 0
        updates = self.options.ratios.update is not None and not (variant == "code" and resets)
        begun.told = {LEFT_OUT: 0.0} if updates or resets else {}
        apart, stalest = 0.0, []
        for stage in begun.stages:
            for part in stage:
                weights = flat(copies, part.names)
                shares = shares.to(weights.dtype)
                if variant == "error-feedback":
                    part.errors += part.former - weights
                    weights = part.former.clone()
                if updates:
                    self._update(part, weights, shares, step)
                if resets:
                    places = self._places(part, weights, self.options.ratios.reset, "reset", step // every)
                    part.met_at[:, places // self._blocks(weights).length] = step + 1
                    mean = (shares * weights[:, places]).sum(0)
                    squares = (weights[:, places] - mean).double().square().sum(1)
                    apart += (shares[:, 0] * squares).sum().item() * weights.shape[1] / len(places)
                    weights[:, places] = mean
                part.former = weights
                restore(copies, part.names, weights)
            stalest.append(max(step + 1 - part.met_at.min().item() for part in stage))
        if resets:
            begun.told |= {DISAGREEMENT: apart, STALEST: sum(stalest) / len(stalest)}

    def _update(self, part: ReplayedPart, weights: torch.Tensor, shares: torch.Tensor, step: int) -> None:
        places = self._places(part, weights, self.options.ratios.update, "update", step)
        if self.options.variant == "error-feedback":
            weights[:, places] -= (shares * part.errors[:, places]).sum(0)
            part.errors[:, places] = 0.0
            return
        if self.options.variant == "code":
            part.met_at[:, places // self._blocks(weights).length] = step + 1
            weights[:, places] = (shares * weights[:, places]).sum(0)
            return
        moved = part.former[:, places] - weights[:, places]
        weights[:, places] += moved - (shares * moved).sum(0)

    def _places(
        self, part: ReplayedPart, weights: torch.Tensor, ratio: float | None, purpose: str, number: int
    ) -> torch.Tensor:
        assert ratio is not None
        shuffled, name = self.options.order == "shuffled", part.names[0]
        drawn = BlockCompressor(self._blocks(weights), ratio, shuffled, SEED, purpose, name)
        return drawn.chosen(number).places

    def tell(self, told: Told, begun: Replay) -> None:
        told |= {name: [number] for name, number in begun.told.items()}

    @torch.no_grad()
    def settle(self, copies: Sequence[Copy]) -> None:
        same = zip(*(copy.masters.parameters() for copy in copies), strict=True)
        for parameters in same:
            pairs = zip(copies, parameters, strict=True)
            parameters[0].copy_(sum(copy.share * one for copy, one in pairs))
        for parameter, master in zip(
            copies[0].model.parameters(), copies[0].masters.parameters(), strict=True
        ):
            parameter.copy_(master)

    def check(self, runtime: RankRuntime) -> None:
        assert runtime.program.steps_per_cycle == self.options.ratios.every


@dataclass(frozen=True)
class Away(Resets):
    """Replicas that miss resets: the others meet without them, and each comes back by the next reset.

    `missed` has, by replica, the first and the last missed reset.
    """

    missed: tuple[tuple[int, int, int], ...] = ()

    def away(self, place: int, step: int, last: int = 1) -> bool:
        """Whether a replica is away in a step; `last` 0: after the reset that ends it."""
        number = step // self.options.ratios.every % (self.options.rounds or 1)
        return any(one == place and first <= number <= end + last for one, first, end in self.missed)

    def rests(self, place: int, step: int) -> bool:
        return self.away(place, step)

    def see_all(self, copies: Sequence[Copy], step: int, told: Told) -> None:
        ran = sum(copy.share for place, copy in enumerate(copies) if not self.rests(place, step))
        for name in {"loss", "gradient_norm"} & told.keys():
            told[name] = [told[name][0] / ran]

    @torch.no_grad()
    def after_step(self, copies: Sequence[Copy], step: int, begun: Replay) -> None:
        shares = torch.tensor([copy.share for copy in copies], dtype=torch.float64)[:, None]
        places = range(len(copies))
        stepped = [one for one in places if not self.away(one, step)]
        meeting = [one for one in places if not self.away(one, step, last=0)]
        ratios = self.options.ratios
        assert ratios.update is not None
        begun.told, apart = {LEFT_OUT: 0.0}, {}
        # Stages share a tied weight.
        parts = {part.names[0]: part for stage in begun.stages for part in stage}
        for name, part in parts.items():
            weights, errors = flat(copies, part.names), part.errors
            moved = part.former - weights
            errors -= moved
            kept = self._places(part, weights, ratios.update, "update", step)
            mean = self._mean(moved[:, kept], shares, stepped)
            for one in stepped:
                weights[one, kept] += moved[one, kept] - mean
                errors[one, kept] += moved[one, kept]
            if (step + 1) % ratios.every == 0:
                for one in set(meeting) - set(stepped):
                    weights[one] = weights[stepped[0]] - errors[stepped[0]] + errors[one]
                kept = self._places(part, weights, ratios.reset, "reset", step // ratios.every)
                mean = self._mean(errors[:, kept], shares, meeting)
                squares = (errors[:, kept] - mean).square().sum(1, keepdim=True)
                apart[name] = self._mean(squares, shares, meeting) * weights.shape[1] / len(kept)
                for one in meeting:
                    weights[one, kept] += mean - errors[one, kept]
                    errors[one, kept] = 0.0
                    part.met_at[one, kept // self._blocks(weights).length] = step + 1
            part.former = weights
            restore(copies, part.names, weights)
        if apart:
            names = [[part.names[0] for part in stage] for stage in begun.stages]
            waits = [
                step + 1 - min(parts[name].met_at[one].min().item() for name in stage)
                for stage in names
                for one in meeting
            ]
            squared = sum(apart[name].item() for stage in names for name in stage)
            begun.told |= {DISAGREEMENT: squared, STALEST: sum(waits) / len(waits)}

    def _mean(self, of: torch.Tensor, shares: torch.Tensor, replicas: Sequence[int]) -> torch.Tensor:
        own = shares[list(replicas)]
        return (own * of[list(replicas)]).sum(0) / own.sum()

    @torch.no_grad()
    def settle(self, copies: Sequence[Copy]) -> None:
        """The mean of those that take the next step stands for all."""
        steps = copies[0].training.steps
        there = [copy for place, copy in enumerate(copies) if not self.away(place, steps)]
        total = sum(copy.share for copy in there)
        for name, parameter in copies[0].masters.named_parameters():
            values = [copy.share / total * dict(copy.masters.named_parameters())[name] for copy in there]
            parameter.copy_(sum(values))

    def check(self, runtime: RankRuntime) -> None:
        options = self.options
        assert runtime.program.steps_per_cycle == options.ratios.every * (options.rounds or 1)


def flat(copies: Sequence[Copy], names: Sequence[str]) -> torch.Tensor:
    """Parameters of every copy, shape (replicas, n)."""
    found = [dict(copy.masters.named_parameters()) for copy in copies]
    return torch.stack([torch.cat([one[name].detach().flatten() for name in names]) for one in found])


def restore(copies: Sequence[Copy], names: Sequence[str], weights: torch.Tensor) -> None:
    """Give every copy its row of the flat weights."""
    for copy, own in zip(copies, weights, strict=True):
        masters, models = dict(copy.masters.named_parameters()), dict(copy.model.named_parameters())
        sizes = [masters[name].numel() for name in names]
        for name, values in zip(names, own.split(sizes), strict=True):
            masters[name].copy_(values.view_as(masters[name]))
            models[name].copy_(masters[name])


def resets(pp: int = 1, **options: Any) -> Resets:
    return Resets(tuple(options.items()), pp)


def away(*missed: tuple[int, int, int], rounds: int, pp: int = 1, **options: Any) -> Away:
    absent = ", ".join(f"{replica}: {first}-{last}" for replica, first, last in missed)
    keeps = {} if "compressor" in options else {"keep_errors": True}
    return Away(tuple({**options, **keeps, "absent": absent, "rounds": rounds}.items()), pp, missed)


ROWS = (
    Row(
        GPT,
        dp=3,
        micro_batches=2,
        shares=(2, 1, 1),
        steps=8,
        methods=(away((1, 1, 1), (2, 1, 2), rounds=5, update_ratio=8.0, reset_ratio=2.0, every=2),),
    ),
    Row(
        TIED,
        "1f1b",
        pp=2,
        dp=2,
        steps=5,
        methods=(away((0, 1, 1), rounds=3, pp=2, update_ratio=8.0, reset_ratio=2.0, every=1), Clips(0.2)),
    ),
    Row(
        LLAMA,
        dp=2,
        steps=3,
        optimizer="adamw",
        methods=(away((1, 1, 2), rounds=5, update_ratio=8.0, reset_ratio=2.0, every=1),),
    ),
    Row(GPT, dp=2, steps=5, methods=(resets(update_ratio=8.0, reset_ratio=2.0, every=2),)),
    Row(GPT, dp=3, steps=4, methods=(resets(ratio=16.0, order="shuffled"),)),
    Row(
        GPT,
        dp=2,
        shares=(3, 1),
        steps=5,
        methods=(resets(update_ratio=8.0, reset_ratio=2.0, every=2), Clips(0.2)),
    ),
    Row(TIED, "1f1b", pp=2, dp=2, steps=4, methods=(resets(2, update_ratio=8.0, reset_ratio=3.0, every=2),)),
    Row(
        LLAMA,
        "1f1b",
        pp=2,
        dp=2,
        steps=5,
        optimizer="adamw",
        methods=(resets(2, update_ratio=8.0, reset_ratio=2.0, every=3, variant="code"),),
    ),
    Row(LLAMA, dp=2, steps=4, optimizer="adamw", methods=(resets(reset_ratio=4.0, every=2),)),
    Row(GPT, dp=2, steps=4, methods=(resets(update_ratio=4.0, reset_ratio=2.0, every=2, keep_errors=True),)),
    Row(GPT, "chimera", pp=2, micro_batches=6, steps=4, methods=(resets(2, ratio=8.0),)),
    Row(GPT, dp=2, shares=(3, 1), steps=4, methods=(resets(ratio=8.0, variant="error-feedback"),)),
    Row(
        LLAMA, dp=2, steps=3, optimizer="lans", methods=(resets(update_ratio=8.0, reset_ratio=2.0, every=2),)
    ),
    Row(GPT, dp=2, steps=3, precision="bf16", methods=(resets(update_ratio=8.0, reset_ratio=2.0, every=2),)),
)
