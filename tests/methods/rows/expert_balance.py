"""Rows with a balance of experts: one process looks at a whole step before it trains on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import ceil
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from decoder_models import tiny_decoder
from equality_jobs import samples
from equality_table import Row
from methods.rows.gradient_norm import Clips
from one_process import Copy, Method, Told, Values, count

from weft.describe.plan import Choice
from weft.methods.expert_balance.places import Swap, busiest, first_places, swap
from weft.methods.expert_balance.runtime.state import ExpertBalance
from weft.run.runtime import RankRuntime
from weft.run.stage.experts import Capacity

IGNORED = -100
# Of some tokens: scores (tokens, experts), squares (tokens,), choices (tokens, k) and which count.
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Balances(Method):
    """A balance of micro-batches of `samples`, of which `replicas` have every so-manieth each."""

    balance: str = "global-batch"
    weight: float = 0.4
    samples: int | None = None
    replicas: int | None = None
    micro_weight: float = 0.0
    z_weight: float = 0.05
    bias_rate: float = 0.0
    capacity: float | None = None
    # Ranks that divide the experts, and exchanges after the first step: (mixture, slot, rank, other rank).
    ranks: int = 1
    moves: tuple[tuple[int, int, int, int], ...] = ()

    def __repr__(self) -> str:
        changed = [
            f", {one.name} {getattr(self, one.name)}"
            for one in fields(self)[1:]
            if getattr(self, one.name) != one.default
        ]
        return f"Balances({self.balance}{''.join(changed)})"

    @property
    def choices(self) -> tuple[Choice, ...]:
        given: dict[str, Any] = {"balance": self.balance, "z_weight": self.z_weight}
        given |= {"bias_rate": self.bias_rate} if self.bias_rate else {}
        given |= {"weight": self.weight} if self.balance != "none" else {}
        given |= {"micro_weight": self.micro_weight} if self.micro_weight else {}
        for name in ("samples", "replicas", "capacity"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        return (Choice(name="expert-balance", options=given),)

    def follow(self, runtime: RankRuntime, step: int) -> None:
        if step == 0 and self.moves:
            state = runtime.methods["expert-balance"]
            assert isinstance(state, ExpertBalance)
            assert state.moves is not None
            runtime.gather_weights()
            state.moves.move(self._swaps)

    @property
    def _swaps(self) -> dict[int, list[Swap]]:
        return {one: [Swap(*each[1:]) for each in self.moves if each[0] == one] for one, *_ in self.moves}

    def begin(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            _VIEWS[copy] = View(copy)
            if self.capacity is not None:
                copy.masters.limit_experts(Capacity(self._most(copy), copy.training.model.sequence))

    def after_step(self, copies: Sequence[Copy], step: int, begun: Any) -> None:
        for copy in copies if self.bias_rate else ():
            routers = copy.masters.routers().values()
            for router, own in zip(routers, map(_joined, _VIEWS[copy].step), strict=True):
                bias = router.e_score_correction_bias
                loads = torch.bincount(own[2][own[3]].flatten(), minlength=len(bias)).double()
                bias += self.bias_rate * (loads.mean() - loads).sign()

    def added_loss(self, copy: Copy, values: Values, targets: torch.Tensor, told: Told) -> torch.Tensor:
        view = _VIEWS[copy]
        if "expert_loads" not in told:
            view.look_at_step(len(copy.learning_rates))
            _tell([_joined(each) for each in view.step], told)
            if self.capacity is not None:
                most = self._most(copy)
                told["dropped_choices"] = [_dropped(view.step, most)]
            if self.ranks > 1:
                self._tell_ranks(told, len(view.step), len(copy.learning_rates))
        number, micro_batches = view.number, count(copy.training.parts)
        view.number += 1
        found = torch.zeros((), dtype=torch.float64)
        for own, step in zip(view.last(targets), view.step, strict=True):
            found += self._of_layer(own, step, number)
        return found * micro_batches

    def _tell_ranks(self, told: Told, mixtures: int, step: int) -> None:
        loads = np.array(told["expert_loads"]).reshape(mixtures, -1)
        places = first_places(mixtures, loads.shape[1], self.ranks)
        for mixture, swaps in self._swaps.items() if step else ():
            for one in swaps:
                swap(places[mixture], one)
        each = [busiest(own, place) for own, place in zip(loads, places, strict=True)]
        told["busiest_expert_rank"] = [sum(each) / mixtures]

    def _most(self, copy: Copy) -> int:
        model, experts = copy.training.model, copy.training.model.architecture.experts
        assert self.capacity is not None
        return ceil(self.capacity * model.sequence * experts.active / experts.count)

    def _of_layer(self, own: Sequence[Routed], step: Sequence[Routed], number: int) -> torch.Tensor:
        """What a micro-batch has in the loss of a layer; both sequences have an entry for each sample."""
        first, size, samples = number * len(own), self.samples or 1, len(step)
        found = torch.zeros((), dtype=torch.float64)
        if self.micro_weight or self.balance in ("micro-batch", "sequence", "none"):
            alone = {"micro-batch": self.weight, "sequence": self.weight}.get(self.balance, self.micro_weight)
            z_weight = 0.0 if self.micro_weight else self.z_weight
            for at in range(0, len(own), size):
                group = _joined(own[at : at + size])
                found += _loss(group, group, group, alone, z_weight) * size / samples
        if self.balance in ("micro-batch", "sequence", "none"):
            return found
        if self.balance == "global-batch":
            whole = _joined(step)
            return found + _loss(whole, whole, _joined(own), self.weight, self.z_weight)
        each = samples // (self.replicas or 1)
        parts = [step[at : at + each] for at in range(0, samples, each)]
        index = first % each
        now = _joined([one for part in parts for one in part[index : index + size]])
        before = _joined([one for part in parts for one in part[: index + size]])
        counted = before if self.balance == "buffer" else now
        return found + _loss(counted, now, _joined(own), self.weight, self.z_weight) * size / each


class View:
    """What the routers of a model decide, by layer.

    Attributes:
        step: the decisions about every sample of a step. number: of the next micro-batch.
    """

    def __init__(self, copy: Copy) -> None:
        self._copy, self.step, self.number = copy, list[list[Routed]](), 0
        self._seen = dict[str, tuple[torch.Tensor, torch.Tensor]]()
        for name, one in copy.masters.named_modules():
            if "Router" in type(one).__name__:
                one.register_forward_hook(partial(self._see, name))

    def _see(self, name: str, module: Any, given: Any, decided: Any) -> None:
        self._seen[name] = decided[0], decided[2]

    @torch.no_grad()
    def look_at_step(self, step: int) -> None:
        training, kept = self._copy.training, dict(self._seen)
        batch = samples(training.model, training, step, training.masks, training.choices)
        layers: list[list[Routed]] = []
        for number in range(count(training.parts)):
            value, targets = batch(number)[:2]
            for function in self._copy.masters.layer_functions(value)[:-1]:
                value = function(value)
            found = self.last(targets)
            layers = [[*have, *more] for have, more in zip(layers or [[]] * len(found), found, strict=True)]
        self.step, self.number = layers, 0
        self._seen.update(kept)

    def last(self, targets: torch.Tensor) -> list[list[Routed]]:
        """The decisions about every sample of the last pass."""
        sigmoid = self._copy.training.model.architecture.experts.scores == "sigmoid"
        counts = torch.cat([_reaching(row) for row in targets])
        found = []
        for given, chosen in self._seen.values():
            logits = given.double()
            each = logits.sigmoid()
            scores = each / each.sum(-1, keepdim=True) if sigmoid else logits.softmax(-1)
            parts = (scores, logits.logsumexp(-1) ** 2, chosen, counts)
            found.append(list(zip(*(one.chunk(len(targets)) for one in parts), strict=True)))
        return found


_VIEWS: WeakKeyDictionary[Copy, View] = WeakKeyDictionary()


def _loss(counted: Routed, together: Routed, own: Routed, weight: float, z_weight: float) -> torch.Tensor:
    """What `own` tokens have in the mean over tokens `together`, with shares of experts among `counted`."""
    chosen = counted[2][counted[3]].flatten()
    if not len(chosen) or not together[3].any():
        return torch.zeros((), dtype=torch.float64)
    experts = own[0].shape[1]
    shares = torch.bincount(chosen, minlength=experts).double() / len(chosen)
    balance, squares = experts * (shares * own[0][own[3]].sum(0)).sum(), own[1][own[3]].sum()
    mean: torch.Tensor = (weight * balance + z_weight * squares) / together[3].sum()
    return mean


def _tell(layers: Sequence[Routed], told: Told) -> None:
    """The tokens of every expert, and how unequal they are: means over layers."""
    experts = layers[0][0].shape[1]
    counts = [torch.bincount(one[2][one[3]].flatten(), minlength=experts).double() for one in layers]
    loads = [one / one.mean() for one in counts]
    losses = [_loss(one, one, one, 1.0, 0.0).item() for one in layers]
    told["expert_loads"] = torch.cat(counts).tolist()
    told["balance_loss"] = [sum(losses) / len(layers)]
    told["expert_violation"] = [sum(one.max().item() - 1.0 for one in loads) / len(layers)]
    told["expert_variation"] = [sum(one.std(correction=0).item() for one in loads) / len(layers)]


def _dropped(layers: Sequence[Sequence[Routed]], most: int) -> float:
    """The share of the choices of a step that lose their expert: of each sample, all but the first ones."""
    lost = chosen = 0
    for samples_of_layer in layers:
        for _, _, experts, counts in samples_of_layer:
            taken = dict[int, int]()
            for pair, counted in zip(experts.tolist(), counts.tolist(), strict=True):
                for expert in pair:
                    taken[expert] = taken.get(expert, 0) + 1
                    lost += counted and taken[expert] > most
                    chosen += counted
    return lost / chosen


def _joined(some: Any) -> Routed:
    scores, squares, chosen, counts = (torch.cat(same) for same in zip(*some, strict=True))
    return scores, squares, chosen, counts


def _reaching(targets: torch.Tensor) -> torch.Tensor:
    """The tokens up to the last one with a target."""
    asked = (targets != IGNORED).nonzero()
    return torch.arange(len(targets)) <= (asked.max() if len(asked) else -1)


SHORT = partial(tiny_decoder, num_hidden_layers=2, vocab_size=19, max_position_embeddings=8)
MIXTRAL, SIGMOID = SHORT("mixtral", intermediate_size=24), SHORT("glm4_moe", first_k_dense_replace=1)
LATENT = SHORT("deepseek_v3", first_k_dense_replace=1)
WHOLE = (Balances(),)
BIASED = partial(Row, SIGMOID, tolerance=1e-5, methods=(Balances(bias_rate=0.2),))
BALANCED = partial(Row, MIXTRAL, masks=True)
MOVES = ((0, 1, 0, 1), (1, 0, 1, 0), (1, 2, 0, 1))
FULL = partial(BALANCED, evaluates=True)
MOVED = partial(BALANCED, optimizer="adamw", steps=3, evaluates=True)
# A sigmoid's logits are in fp32, and so are the parts of a router's gradient that tensor ranks add up.
ROUNDED = partial(Row, tolerance=1e-5)
ROWS = (
    BALANCED(pp=2, methods=WHOLE),
    ROUNDED(SIGMOID, "breadth-first", pp=2, dp=2, loops=2, sharding="zero-2", methods=(*WHOLE, Clips(0.2))),
    BALANCED(dp=3, shares=(1, 3, 2), recompute="full", methods=WHOLE),
    BALANCED(cp=2, methods=(Balances(samples=2, micro_weight=0.3),)),
    BALANCED(ep=2, dp=2, methods=(Balances(ranks=2),)),
    BALANCED(pp=2, splits=(2, 1), micro_batch_size=4, methods=WHOLE),
    BALANCED("1f1b", pp=2, dp=2, micro_batches=1, methods=WHOLE),
    BALANCED(tp=2, tolerance=1e-5, methods=(Balances(samples=1, micro_weight=0.3),)),
    BALANCED("chimera", pp=2, micro_batches=2, methods=WHOLE),
    # Of one micro-batch of each replica, or of all until it.
    BALANCED("1f1b", pp=2, dp=2, methods=(Balances("buffer", samples=2, replicas=2),)),
    BALANCED("zb-h1", pp=2, recompute="full", methods=(Balances("buffer", samples=2, replicas=1),)),
    BALANCED("1f1b", dp=2, methods=(Balances("synchronised", samples=2, replicas=2),)),
    BALANCED("chimera", pp=2, methods=(Balances("synchronised", samples=2, replicas=2),)),
    # A plan's micro-batches may be larger than those of the balance.
    BALANCED("1f1b", pp=2, micro_batch_size=4, methods=(Balances("micro-batch", samples=2),)),
    BALANCED("zb-v", pp=2, loops=2, methods=(Balances("sequence"),)),
    BALANCED(cp=2, micro_batch_size=4, methods=(Balances("micro-batch", samples=2),)),
    BALANCED(ep=2, methods=(Balances("sequence", ranks=2),)),
    BALANCED(cp=2, ep=2, methods=(Balances("sequence", ranks=2), Clips(0.2))),
    BALANCED(tp=2, tolerance=1e-5, methods=(Balances("sequence"),)),
    ROUNDED(SIGMOID, "1f1b", dp=2, methods=(Balances("none"),)),
    # Biases that change the choice of the next step.
    BIASED(dp=3, shares=(1, 3, 2)),
    BIASED("1f1b", pp=2, recompute="full", methods=(Balances("none", bias_rate=0.2),)),
    BIASED("chimera", pp=2, micro_batches=2),
    BIASED(dp=2, tp=2),
    BIASED(dp=2, ep=2, sharding="zero-2", methods=(Balances(bias_rate=0.2, ranks=2),)),
    ROUNDED(LATENT, "breadth-first", pp=2, loops=2, methods=(Balances(bias_rate=0.2), Clips(0.2))),
    # Experts that take no more tokens of a sample than the mean.
    FULL(pp=2, recompute="full", methods=(Balances(capacity=1.0),)),
    FULL("1f1b", dp=2, micro_batch_size=1, methods=(Balances("none", capacity=0.5),)),
    FULL(dp=2, ep=2, sharding="zero-2", methods=(Balances(capacity=1.0, ranks=2),)),
    FULL("zb-h1", pp=2, micro_batch_size=4, methods=(Balances("sequence", capacity=0.75),)),
    FULL(tp=2, ep=2, tolerance=1e-5, methods=(Balances("sequence", capacity=1.0, ranks=2),)),
    # Experts that move after the first step, with their states.
    MOVED(ep=2, methods=(Balances(ranks=2, moves=MOVES),)),
    MOVED(dp=2, ep=2, sharding="zero-2", methods=(Balances(ranks=2, moves=MOVES), Clips(0.2))),
    MOVED(
        "breadth-first",
        dp=2,
        ep=2,
        loops=2,
        sharding="zero-3",
        recompute="full",
        methods=(Balances(ranks=2, moves=MOVES),),
    ),
    MOVED("chimera", pp=2, ep=2, micro_batches=2, methods=(Balances(ranks=2, moves=MOVES),)),
    MOVED(pp=2, ep=3, micro_batch_size=3, methods=(Balances(ranks=3, moves=((1, 0, 2, 0), (1, 1, 1, 2))),)),
)
