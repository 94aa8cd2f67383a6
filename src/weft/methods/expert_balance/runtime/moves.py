"""`ExpertMoves`: the experts of one rank, which change places with those of other ranks between two steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from weft.methods.expert_balance.places import Swap, swap
from weft.methods.expert_balance.relocation import relocation
from weft.methods.expert_balance.report import MOVED
from weft.methods.expert_balance.runtime.loads import rank_load_of
from weft.planning.planned_job import PlannedJob
from weft.program.arrays import Ints
from weft.run.parallel.expert_ranks import ExpertRanks
from weft.run.resources import Resources
from weft.run.stage.families.decoder import DecoderStage
from weft.training.checkpoint.stage_tensors import Owner, owners_by_name
from weft.training.coordination.agreement import from_first_rank


class ExpertMoves:
    """The places of all experts of a model, and exchanges of those of one rank.

    Args:
        mixtures: the positions of all layers with experts.
        places: the expert of each slot, (mixtures, ranks, slots).
    """

    def __init__(self, mixtures: Sequence[int], places: Ints, resources: Resources) -> None:
        self._mixtures, self.places, self._resources = tuple(mixtures), places, resources
        self._on_device = torch.tensor(places, device=resources.device)
        # Tokens of each expert since the last decision, (mixtures x experts,).
        self._recent = torch.zeros(places.size, dtype=torch.float64, device=resources.device)

    def count(self, loads: torch.Tensor) -> dict[str, torch.Tensor]:
        """Count the tokens of each expert in a step, (mixtures x experts,), and return the ranks' figure."""
        self._recent += loads
        return rank_load_of(loads, self._on_device)

    def decide(self, done: int, job: PlannedJob, *, steps: int) -> Mapping[str, Any] | None:
        """Move experts if that saves more in the next `steps` than it takes; every rank calls it."""
        begun_s = time.monotonic()
        # A copy: on a CPU, the array of a tensor has its memory.
        loads = self._recent.cpu().numpy().reshape(len(self._mixtures), -1).copy()
        self._recent.zero_()
        found: dict[str, Any] | None = None
        if self._resources.rank == 0:
            best = relocation(job, loads, self.places)
            if best is not None and best.pays(min(steps, job.last_step - done)):
                found = {
                    "swaps": {str(mixture): each for mixture, each in best.swaps.items()},
                    "saved_s": best.saved_s,
                    "move_s": best.move_s,
                    "moved_bytes": best.moved_bytes,
                    "busiest": best.busiest,
                    "busiest_after": best.busiest_after,
                }
        found = from_first_rank(found)
        if found is None:
            return None
        swaps = {int(mixture): [Swap(*one) for one in each] for mixture, each in found["swaps"].items()}
        decided_s = time.monotonic()
        self.move(swaps)
        moved = {"swaps": sum(map(len, swaps.values())), "layers": len(swaps)}
        times = {"decided_s": decided_s - begun_s, "took_s": time.monotonic() - decided_s}
        return {"event": MOVED, "step": done, **found, **moved, **times}

    def move(self, swaps: Mapping[int, Sequence[Swap]]) -> None:
        """Exchange experts by the place of their mixture; every rank calls it."""
        before = self.places.copy()
        for mixture, each in swaps.items():
            for one in each:
                swap(self.places[mixture], one)
        self._on_device.copy_(torch.from_numpy(self.places))
        for stage in self._resources.stages.values():
            assert isinstance(stage, DecoderStage), "only decoders have experts"
            for mixture in sorted(swaps):
                if self._mixtures[mixture] in stage.experts():
                    self._move(stage, mixture, before[mixture])
        for shard in self._resources.stepped.values():
            shard.publish()

    def _move(self, stage: DecoderStage, mixture: int, before: Ints) -> None:
        after, layer = self.places[mixture], self._mixtures[mixture]
        rank_of = np.empty(after.size, dtype=np.int64)
        rank_of[before] = np.arange(len(before))[:, None]
        own = {id(parameter) for parameter in stage.experts()[layer].parameters()}
        resources = self._resources
        for owners in owners_by_name(resources.stages, resources.optimizers, resources.stepped).values():
            for owner in (one for one in owners if id(one.parameter) in own):
                slots = list(_slots(owner, after.shape[1]))
                for tensor in _elementwise(owner):
                    exchange(tensor, slots, rank_of[after], stage.expert)
        stage.place_experts(layer, after.flatten().tolist())


def _elementwise(owner: Owner) -> Iterator[torch.Tensor]:
    """Yield the stepped elements of a parameter and their states, flat."""
    stepped = owner.stepped.detach()
    states = owner.optimizer.state.get(owner.stepped, {})
    for one in (stepped, *(states[leaf] for leaf in sorted(states))):
        if isinstance(one, torch.Tensor) and one.ndim:
            yield one.view(-1)


def _slots(owner: Owner, slots: int) -> Iterator[slice]:
    """Yield the elements of each slot in the piece of a parameter that an owner steps."""
    size = owner.parameter.numel() // slots
    for slot in range(slots):
        first, end = max(owner.start, slot * size), min(owner.end, (slot + 1) * size)
        yield slice(first - owner.start, max(first, end) - owner.start)


def exchange(flat: torch.Tensor, slots: Sequence[slice], source: Ints, ranks: ExpertRanks) -> None:
    """Fill the slots of a flat tensor with those of other ranks, in place; every rank calls it.

    Args:
        slots: the elements of each slot, as many on all ranks.
        source: the rank that has what goes to each slot of each rank, (ranks, slots).
    """
    me, others = ranks.place, [rank for rank in range(ranks.size) if rank != ranks.place]
    # By rank, the elements that go there, and where those that come from there go.
    sent = {
        rank: [flat[slot] for slot, of in zip(slots, source[rank], strict=True) if of == me]
        for rank in others
    }
    taken = {
        rank: [slot for slot, of in zip(slots, source[me], strict=True) if of == rank] for rank in others
    }
    received = flat.new_empty(sum(_length(slot) for each in taken.values() for slot in each))
    lengths = (
        [sum(map(_length, taken.get(rank, ()))) for rank in range(ranks.size)],
        [sum(map(len, sent.get(rank, ()))) for rank in range(ranks.size)],
    )
    with ranks.meeting():
        ranks.group.all_to_all_rows(received, torch.cat([flat[:0], *chain(*sent.values())]), *lengths)
    filled = list(chain(*taken.values()))
    for slot, content in zip(filled, received.split([_length(slot) for slot in filled]), strict=True):
        flat[slot] = content


def _length(part: slice) -> int:
    return int(part.stop - part.start)
