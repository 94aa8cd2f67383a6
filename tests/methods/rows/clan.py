"""Rows whose replicas compress both ways: one process keeps all errors and encodes the same blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from equality_table import Row
from methods.rows.gradient_norm import Clips
from one_process import Copy, Method, Told
from small_jobs import SEED
from small_plans import tiny

from weft.describe.plan import Choice
from weft.methods.clan.options import NAME, ClanOptions
from weft.methods.clan.runtime.codecs import Draw, codec_of
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage
from weft.run.state.synchroniser_state import SYNCHRONISER
from weft.sync.codecs.counter import Key


def root(number: float) -> float:
    """As torch rounds it."""
    return torch.tensor(number, dtype=torch.float64).sqrt().item()


SMALL = (("block", 32), ("minimum_bytes", 512), ("piece_bytes", 4096))


@dataclass(frozen=True)
class BothWays(Method):
    """`pieces` and `layers` of each stage; `memory` has errors by stage, piece and holder."""

    pieces: tuple[int, ...]
    codec: str = "scaled-sign"
    layers: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    memory: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    by_share = True

    @property
    def sync(self) -> Choice:
        return Choice(name=NAME, options={**dict(SMALL), "codec": self.codec, **dict(self.options)})

    @property
    def table(self) -> ClanOptions:
        return ClanOptions.model_validate(dict(self.sync.options))

    def reduce(
        self, copy: Copy, step: int, addends: Sequence[Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        if not step:
            self.memory.clear()
        names = [name for name, _ in copy.masters.named_parameters()]
        sums = dict(zip(names, (sum(same) for same in zip(*addends, strict=True)), strict=True))
        each = [dict(zip(names, gradients, strict=True)) for gradients in addends]
        for stage, members in enumerate(self.members(copy)):
            large = [name for name in members if 4 * sums[name].numel() >= self.table.minimum_bytes]
            flats = [torch.cat([one[name].flatten() for name in large]) for one in each]
            total, found = len(flats[0]), []
            squares = [[0.0, 0.0, 0.0] for _ in flats]
            for part in range(self.pieces[stage]):
                count = self.pieces[stage]
                mine = slice(total * part // count, total * (part + 1) // count)
                found.append(self.exchanged(stage, part, step, [flat[mine] for flat in flats], squares))
            lengths = [sums[name].numel() for name in large]
            for name, one in zip(large, torch.cat(found).split(lengths), strict=True):
                sums[name] = one.view(sums[name].shape)
            left = [one / whole if whole else 0.0 for whole, one, _ in squares]
            errors = [root(one / of) if of else 0.0 for _, one, of in squares]
            self.memory["told", "contraction", stage] = left
            self.memory["told", "kept_errors", stage] = errors
        return [sums[name] for name in names]

    def exchanged(
        self,
        stage: int,
        part: int,
        step: int,
        gradients: Sequence[torch.Tensor],
        squares: list[list[float]],
    ) -> torch.Tensor:
        """The decoded sum of a piece of all replicas' gradients."""
        table = self.table.of_piece(stage, part)
        owners, elements = table.servers or len(gradients), len(gradients[0])
        blocks = -(-elements // (owners * table.block))
        share = blocks * table.block
        common = Key.of(SEED, NAME, "indices", stage, step, part)

        def coded(numbers: torch.Tensor, place: int, direction: str, sender: int) -> torch.Tensor:
            codec, count = codec_of(table), min(max(elements - place * share, 0), share)
            payload = torch.empty(table.payload_bytes(blocks), dtype=torch.uint8)
            own = Key.of(SEED, NAME, direction, stage, step, part, sender)
            draw = Draw(own, common, place * blocks)
            codec.encode(numbers.float().view(blocks, table.block), count, payload, draw)
            decoded = torch.empty(blocks, table.block)
            codec.decode(payload, decoded, draw)
            decoded.view(-1)[count:] = 0.0
            return decoded.view(-1).to(numbers.dtype)

        def with_error(numbers: torch.Tensor, *holder: Any) -> torch.Tensor:
            return numbers + self.memory.get((stage, part, *holder), 0.0) if table.keeps_errors else numbers

        sent = []
        for replica, gradient in enumerate(gradients):
            padded = torch.zeros(owners * share, dtype=gradient.dtype)
            padded[:elements] = gradient
            numbers = with_error(padded, replica)
            shares = numbers.view(owners, share)
            sent.append([coded(one, place, "push", replica) for place, one in enumerate(shares)])
            left = numbers - torch.cat(sent[-1])
            self.memory[stage, part, replica] = left
            own = replica % owners
            seen = slice(None) if table.keeps_errors else slice(own * share, (own + 1) * share)
            of = padded if table.keeps_errors else numbers[seen]
            for place, one in enumerate((numbers[seen], left[seen], of)):
                squares[replica][place] += torch.dot(one, one).item()
        found = []
        for place in range(owners):
            total = with_error(sum(shares[place] for shares in sent), "owner", place)
            found.append(coded(total, place, "pull", place))
            self.memory[stage, part, "owner", place] = total - found[-1]
        return torch.cat(found)[:elements]

    def before_step(self, copy: Copy, step: int, told: Told) -> None:
        for key, each in self.memory.items():
            if key[0] == "told":
                told[f"{key[1]}_of_stage_{key[2]}"] = [sum(one * (1.0 / len(each)) for one in each)]

    def members(self, copy: Copy) -> list[list[str]]:
        """The names of each stage's parameters."""
        config = copy.training.model
        borders = list(accumulate(self.layers or (config.layers + 2,), initial=0))
        stages = (build_stage(config, range(*pair), SEED, torch.float32) for pair in pairwise(borders))
        return [[name for name, _ in stage.named_parameters()] for stage in stages]

    def publish(self, copy: Copy, step: int) -> None:
        for parameter, master in zip(copy.model.parameters(), copy.masters.parameters(), strict=True):
            parameter.copy_(master)

    def check(self, runtime: RankRuntime) -> None:
        rows = [one for one in runtime.program.instructions() if one.kind.name == "compress"]
        for stage in runtime.stages:
            assert sum(one.stage == stage for one in rows) == self.pieces[stage]
        methods = runtime.methods[SYNCHRONISER], runtime.methods[NAME]
        kept = [one for method in methods for one in method.rank_tensors().values()]
        assert any(one.any() for one in kept) == self.table.keeps_errors
        # A replica keeps its own errors, and those of sums if there is no server.
        assert len(rows) == 0 or any(name.startswith("owned") for name in methods[0].rank_tensors()) == (
            self.table.keeps_errors and not self.table.servers
        )


@dataclass(frozen=True)
class Identity(Method):
    """All numbers of all blocks, sent as they are: dense training."""

    sync = Choice(name=NAME, options={**dict(SMALL), "codec": "top-k", "ratio": 1.0})

    def before_step(self, copy: Copy, step: int, told: Told) -> None:
        told |= {"contraction_of_stage_0": [0.0], "kept_errors_of_stage_0": [0.0]}

    def check(self, runtime: RankRuntime) -> None:
        kinds = [one.kind.name for one in runtime.program.instructions()]
        assert kinds.count("decompress") > 1


GPT = tiny(layers=2)
SENT = partial(Row, GPT, micro_batches=2, precision="fp32", optimizer="adamw", steps=4)
BITS = partial(SENT, same_bits=True)
ROWS = (
    BITS(dp=2, methods=(Identity(),)),
    BITS(dp=2, methods=(BothWays((5,)),)),
    BITS(dp=3, methods=(BothWays((5,), "top-k", options=(("ratio", 8.0), ("value_bits", 16))),)),
    BITS(dp=2, precision="bf16", methods=(BothWays((5,), "random-k", options=(("ratio", 4.0),)),)),
    BITS(dp=2, pp=2, schedule="1f1b", methods=(BothWays((3, 3), "linear-dithering", layers=(2, 2)),)),
    BITS(dp=2, methods=(BothWays((5,), options=(("piece_codecs", "0.1 natural-dithering, 0.3 fp32"),)),)),
    # Two servers own sums that three replicas give, and one those of two stages.
    BITS(dp=3, methods=(BothWays((5,), options=(("servers", 2),)),)),
    BITS(
        dp=2,
        pp=2,
        schedule="1f1b",
        methods=(BothWays((3, 3), "natural-dithering", (2, 2), (("servers", 1),)),),
    ),
    BITS(dp=2, optimizer="lans", methods=(BothWays((5,), "natural-dithering", options=(("bits", 4),)),)),
    # Losses and norms are added up in other orders than in one process.
    SENT(dp=3, shares=(3, 1, 2), precision="fp64", methods=(BothWays((5,)), Clips(0.05))),
    SENT(dp=2, precision="fp64", methods=(BothWays((5,), "fp16", options=(("errors", "dropped"),)),)),
)
