"""Gradients reduced in few bits on one or two levels, and weights gathered as quantised changes.

No residual is kept. That of weights is in the next change, which is taken to what all replicas have (Jia et
al., SDP4Bit, arXiv 2410.15526). Gradients are transformed before their first quantising and back after the
last sum. The transform is linear, so it does not matter where the sums are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm, prod

import torch

from weft.methods.sdp4bit.options import NAME, Sdp4BitOptions
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, Issue, meeting_of
from weft.run.methods import HandlerOf
from weft.run.state.bucket import GradientBucket
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.sync.base import Meeting, ParameterPlace, SynchroniserOf
from weft.sync.codecs.counter import Key
from weft.sync.codecs.path import BLOCK
from weft.sync.codecs.quantiser import Quantiser, unsmooth_
from weft.sync.dense import Dense

# The end of the sum inside nodes of a slice.
INSIDE = "inside_sum"


class QuantisedGradients(Dense):
    """Reductions of gradients in few bits, for replicas that each keep a share of the sum."""

    def __init__(self, options: Sdp4BitOptions) -> None:
        self._options = options
        # On two levels: by stage and slice, a node's sums, encoded for the ranks that add them up. They are
        # kept from step to step, because one stream fills them and another one reads them.
        self._sums: dict[tuple[int, int], torch.Tensor] = {}
        # By stage, the sums of this rank's share.
        self._totals: dict[int, torch.Tensor] = {}
        self._places: dict[int, Sequence[ParameterPlace]] = {}
        # By stage, the elements of this rank's share with no parameter.
        self._padding: dict[int, torch.Tensor] = {}

    def lay_out(self, stage: int, places: Sequence[ParameterPlace]) -> None:
        self._places[stage] = places

    @property
    def slices(self) -> int:
        """The number of parts of each reduction on two levels."""
        return self._options.slices

    def reduce_inside(self, gradient: torch.Tensor, shards: int, meeting: Meeting) -> None:
        """Add up a slice of the gradients of the meeting's replicas, neighbours on a node.

        Keep the sums for this rank and its counterparts on the other nodes. `shards` counts all replicas.
        """
        options, size, nodes = self._options, meeting.group.size, shards // meeting.group.size
        part, number = divmod(meeting.part, options.slices)
        meeting = replace(meeting, part=part)
        first, last = self._quantiser(options.inside_bits), self._quantiser()
        length = len(gradient) // shards
        mine = self._slice(number, length)
        if mine.start == mine.stop:
            # The share has fewer groups than slices.
            return
        # Neighbour j gets the shares of all ranks with place j on their nodes.
        encoded = self._encoded(gradient.view(shards, length), mine, first, meeting)
        given = encoded.view(nodes, size, -1).transpose(0, 1).contiguous()
        taken = torch.empty_like(given)
        meeting.group.all_to_all(taken.view(-1), given.view(-1))
        elements = mine.stop - mine.start
        key, place = key_of(meeting, "gradient sums"), (meeting.stage, number)
        if place not in self._sums:
            self._sums[place] = given.new_empty(nodes, last.payload_bytes(elements))
        for node, payload in enumerate(self._sums[place]):
            begins = (node * size + meeting.group.place) * length + mine.start
            last.encode_sum(taken[:, node].contiguous(), first, elements, payload, key, begins)

    def reduce_between(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Add up a slice of this rank's share over the nodes, from the sums inside all of them."""
        self._add_up(meeting.part % self._options.slices, gradient, meeting)

    def reduce_scatter(self, gradient: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        """Return this rank's share of the sum, shape (n / replicas,), in the precision of `gradient`."""
        options, size = self._options, meeting.group.size
        if options.gradients == "whole":
            return super().reduce_scatter(gradient, meeting)
        if options.has_two_levels(size):
            self._add_up(options.slices - 1, gradient, meeting)
            total = self._totals.pop(meeting.stage)
        else:
            quantiser, shares = self._quantiser(options.last_bits(size)), gradient.view(size, -1)
            given = self._encoded(shares, slice(0, shares.shape[1]), quantiser, meeting)
            taken, total = torch.empty_like(given), torch.empty_like(shares[0], dtype=torch.float32)
            meeting.group.all_to_all(taken.view(-1), given.view(-1))
            quantiser.decode_sum(taken, total)
        if options.smooth:
            unsmooth_(total)
            # Transforms leave something of their neighbours there, which a norm would count.
            total.index_fill_(0, self._padding_of(meeting, total), 0.0)
        return total.to(gradient.dtype)

    def _padding_of(self, meeting: Meeting, share: torch.Tensor) -> torch.Tensor:
        """Return the elements of this rank's share, shape (n,), that belong to no parameter."""
        stage = meeting.stage
        if stage not in self._padding:
            empty, first = torch.ones(len(share), dtype=torch.bool), meeting.group.place * len(share)
            everything = [ParameterPlace(first, (len(share),))]
            for start, shape in self._places.get(stage, everything):
                empty[max(0, start - first) : max(0, start + prod(shape) - first)] = False
            self._padding[stage] = torch.nonzero(empty).flatten().to(share.device)
        return self._padding[stage]

    def _add_up(self, number: int, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Exchange the encoded sums of a slice with this rank's counterparts, and add them up."""
        size, step, length = meeting.group.size, self._options.replicas_per_node, len(gradient)
        if number == 0:
            self._totals[meeting.stage] = gradient.new_empty(length // size, dtype=torch.float32)
        mine = self._slice(number, length // size)
        if mine.start == mine.stop:
            return
        given = self._sums[meeting.stage, number]
        taken = torch.empty_like(given)
        counterparts = range(meeting.group.place % step, size, step)
        meeting.group.exchange(taken.view(-1), given.view(-1), counterparts)
        self._quantiser().decode_sum(taken, self._totals[meeting.stage][mine])

    def _slice(self, number: int, length: int) -> slice:
        """Return a slice of a share; whole groups of one scale and whole transforms fall into each."""
        unit, slices = lcm(self._options.gradient_group, BLOCK), self._options.slices
        ends = [
            length * at // slices // unit * unit if at < slices else length for at in (number, number + 1)
        ]
        return slice(*ends)

    def _quantiser(self, bits: int | None = None) -> Quantiser:
        """Return the quantiser of gradients; None: of sums that are smooth already."""
        options = self._options
        smooth = options.smooth and bits is not None
        return Quantiser(bits=bits or options.gradient_bits, group=options.gradient_group, smooth=smooth)

    def _encoded(
        self, shares: torch.Tensor, mine: slice, quantiser: Quantiser, meeting: Meeting
    ) -> torch.Tensor:
        """Return the payloads, shape (shares, bytes), of one slice of `shares`, shape (shares, n)."""
        count, length = shares.shape
        size = quantiser.payload_bytes(mine.stop - mine.start)
        payloads, key = shares.new_empty(count, size, dtype=torch.uint8), key_of(meeting, "gradient")
        for index, (share, payload) in enumerate(zip(shares, payloads, strict=True)):
            quantiser.encode(share[mine], payload, key, index * length + mine.start)
        return payloads


class QuantisedSharding(QuantisedGradients):
    """Gradients as in `QuantisedGradients`, and gathers of quantised weights or of their changes."""

    def gather(self, weights: torch.Tensor, own: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        """Add every rank's quantised change, or put its quantised weights, into `weights` on all ranks."""
        options, shares, quantiser = self._options, weights.view(meeting.group.size, -1), self._of_weights
        payload = own.new_empty(quantiser.payload_bytes(len(own)), dtype=torch.uint8)
        key = key_of(meeting, "weights")
        if options.weights == "direct":
            quantiser.encode(own, payload, key)
        else:
            quantiser.encode_difference(own, shares[meeting.group.place], payload, key)
        payloads = payload.new_empty(len(shares), len(payload))
        meeting.group.all_gather(payloads.view(-1), payload)
        self.take_in(weights, payloads)
        return payload

    def take_in(self, weights: torch.Tensor, payloads: torch.Tensor) -> None:
        shares = weights.view(len(payloads), -1)
        decoded = torch.empty_like(shares[0], dtype=torch.float32)
        for share, received in zip(shares, payloads, strict=True):
            self._of_weights.decode(received, decoded)
            if self._options.weights == "direct":
                share.copy_(decoded)
            else:
                share.add_(decoded.to(share.dtype))

    @property
    def _of_weights(self) -> Quantiser:
        return Quantiser(bits=self._options.weight_bits, group=self._options.weight_group)


def key_of(meeting: Meeting, *what: str) -> Key:
    """Return the key of what one rank quantises at a meeting."""
    return Key.of(meeting.seed, *what, meeting.stage, meeting.step, meeting.part, meeting.replica)


def reduce_inside(workspace: Workspace, instruction: Instruction) -> Issue:
    """Add up a slice of a stage's gradient over the replicas of this rank's node."""
    stage, label = instruction.stage, str(instruction)
    bucket, synchroniser, number = _sliced(workspace, instruction)

    def issue(stream: Stream) -> Completion:
        meeting = meeting_of(workspace, instruction)

        def work() -> None:
            synchroniser.reduce_inside(bucket.flat, bucket.shards, meeting)

        summed = Value.of(None, stream.run(label, work, workspace.latest(GRADIENT, stage)))
        workspace.values[INSIDE, stage, number] = summed
        if number == synchroniser.slices - 1:
            # The reduction follows it.
            workspace.values[GRADIENT, stage, NONE] = summed
        return summed.completion

    return issue


def reduce_between(workspace: Workspace, instruction: Instruction) -> Issue:
    """Add up a slice of a stage's gradient over the nodes; the reduction follows on the same stream."""
    stage, label = instruction.stage, str(instruction)
    bucket, synchroniser, number = _sliced(workspace, instruction)

    def issue(stream: Stream) -> Completion:
        meeting = meeting_of(workspace, instruction)

        def work() -> None:
            synchroniser.reduce_between(bucket.flat, meeting)

        return stream.run(label, work, workspace.values[INSIDE, stage, number])

    return issue


def _sliced(workspace: Workspace, instruction: Instruction) -> tuple[GradientBucket, QuantisedGradients, int]:
    """Return the gradient of an instruction, what sums it, and the slice."""
    resources = workspace.resources
    synchroniser = resources.synchroniser
    assert isinstance(synchroniser, QuantisedGradients), "the method brings its own"
    return resources.buckets[instruction.stage], synchroniser, instruction.part % synchroniser.slices


def _synchroniser(options: Sdp4BitOptions) -> QuantisedGradients:
    return QuantisedGradients(options) if options.weights == "whole" else QuantisedSharding(options)


PARTS = (
    HandlerOf(kind="reduce_inside", handler=reduce_inside),
    HandlerOf(kind="reduce_between", handler=reduce_between),
    SynchroniserOf(name=NAME, make=_synchroniser),
)
