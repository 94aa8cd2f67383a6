"""Gradients reduced in few bits on one or two levels, and weights gathered as quantised changes.

No residual is kept. That of weights is in the next change, which is taken to what all replicas have (Jia et
al., SDP4Bit, arXiv 2410.15526). Gradients are transformed before their first quantising and back after the
last sum: the transform is linear, and sums of transformed numbers are transformed sums.
"""

from __future__ import annotations

import torch

from weft.methods.sdp4bit.options import NAME, Sdp4BitOptions
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, Issue, meeting_of
from weft.run.methods import HandlerOf
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.sync.base import Meeting, SynchroniserOf
from weft.sync.codecs.counter import Key
from weft.sync.codecs.quantiser import Quantiser, unsmooth_
from weft.sync.dense import Dense


class QuantisedGradients(Dense):
    """Reductions of gradients in few bits, for replicas that each keep a share of the sum."""

    def __init__(self, options: Sdp4BitOptions) -> None:
        self._options = options
        # By stage: the sums of a node's replicas, encoded for the nodes that keep them.
        self._sums: dict[int, torch.Tensor] = {}

    def reduce_inside(self, gradient: torch.Tensor, everyone: int, meeting: Meeting) -> None:
        """Add up the gradients of the meeting's replicas, neighbours on a node.

        Keep the encoded sums of the shares that this rank's counterparts on all nodes own, of `everyone`
        replicas.
        """
        size, place, nodes = meeting.group.size, meeting.group.place, everyone // meeting.group.size
        first, last = self._quantiser(self._options.inside_bits), self._quantiser()
        length = len(gradient) // everyone
        # Neighbour j gets the shares of all ranks with place j on their nodes.
        by_node = self._encoded(gradient.view(everyone, length), first, meeting).view(nodes, size, -1)
        given = by_node.transpose(0, 1).contiguous()
        taken = torch.empty_like(given)
        meeting.group.all_to_all(taken.view(-1), given.view(-1))
        sums = given.new_empty(nodes, last.payload_bytes(length))
        key = key_of(meeting, "gradient sums")
        for node, payload in enumerate(sums):
            payloads = taken[:, node].contiguous()
            last.encode_sum(payloads, first, length, payload, key, (node * size + place) * length)
        self._sums[meeting.stage] = sums

    def reduce_scatter(self, gradient: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        """Return this rank's share of the sum, shape (n / replicas,), in the precision of `gradient`."""
        if self._options.gradients == "whole":
            return super().reduce_scatter(gradient, meeting)
        size, places = meeting.group.size, range(meeting.group.size)
        given = self._sums.pop(meeting.stage, None)
        if given is None:
            quantiser = self._quantiser(self._options.last_bits(size))
            given = self._encoded(gradient.view(size, -1), quantiser, meeting)
        else:
            quantiser, step = self._quantiser(), self._options.replicas_per_node
            places = range(meeting.group.place % step, size, step)
        taken = torch.empty_like(given)
        meeting.group.exchange(taken.view(-1), given.view(-1), places)
        total = gradient.new_empty(len(gradient) // size, dtype=torch.float32)
        quantiser.decode_sum(taken, total)
        if self._options.smooth:
            unsmooth_(total)
        return total.to(gradient.dtype)

    def _quantiser(self, bits: int | None = None) -> Quantiser:
        """Return the quantiser of gradients; None: of sums that are smooth already."""
        options = self._options
        smooth = options.smooth and bits is not None
        return Quantiser(bits=bits or options.gradient_bits, group=options.gradient_group, smooth=smooth)

    def _encoded(self, shares: torch.Tensor, quantiser: Quantiser, meeting: Meeting) -> torch.Tensor:
        """Return the payloads, shape (shares, bytes), of `shares`, shape (shares, n)."""
        count, length = shares.shape
        payloads = shares.new_empty(count, quantiser.payload_bytes(length), dtype=torch.uint8)
        key = key_of(meeting, "gradient")
        for index, (share, payload) in enumerate(zip(shares, payloads, strict=True)):
            quantiser.encode(share, payload, key, index * length)
        return payloads


class QuantisedSharding(QuantisedGradients):
    """Gradients as in `QuantisedGradients`, and gathers of quantised weights or of their changes."""

    def gather(self, weights: torch.Tensor, own: torch.Tensor, meeting: Meeting) -> None:
        """Add every rank's quantised change, or put its quantised weights, into `weights` on all ranks."""
        options, shares = self._options, weights.view(meeting.group.size, -1)
        quantiser = Quantiser(bits=options.weight_bits, group=options.weight_group)
        payload = own.new_empty(quantiser.payload_bytes(len(own)), dtype=torch.uint8)
        key = key_of(meeting, "weights")
        if options.weights == "direct":
            quantiser.encode(own, payload, key)
        else:
            quantiser.encode_difference(own, shares[meeting.group.place], payload, key)
        payloads = payload.new_empty(len(shares), len(payload))
        meeting.group.all_gather(payloads.view(-1), payload)
        decoded = torch.empty_like(own, dtype=torch.float32)
        for share, received in zip(shares, payloads, strict=True):
            quantiser.decode(received, decoded)
            if options.weights == "direct":
                share.copy_(decoded)
            else:
                share.add_(decoded.to(share.dtype))


def key_of(meeting: Meeting, *what: str) -> Key:
    """Return the key of what one rank quantises at a meeting."""
    return Key.of(meeting.seed, *what, meeting.stage, meeting.step, meeting.part, meeting.replica)


def reduce_inside(workspace: Workspace, instruction: Instruction) -> Issue:
    """Add up a stage's gradient over the replicas of this rank's node; its reduction then sends the sums."""
    stage, label, resources = instruction.stage, str(instruction), workspace.resources
    bucket, synchroniser = resources.buckets[stage], resources.synchroniser
    assert isinstance(synchroniser, QuantisedGradients), "the method brings its own"

    def issue(stream: Stream) -> Completion:
        meeting = meeting_of(workspace, instruction)

        def work() -> None:
            synchroniser.reduce_inside(bucket.flat, bucket.shards, meeting)

        summed = stream.run(label, work, workspace.latest(GRADIENT, stage))
        workspace.values[GRADIENT, stage, NONE] = Value.of(None, summed)
        return summed

    return issue


def _synchroniser(options: Sdp4BitOptions) -> QuantisedGradients:
    return QuantisedGradients(options) if options.weights == "whole" else QuantisedSharding(options)


PARTS = (
    HandlerOf(kind="reduce_inside", handler=reduce_inside),
    SynchroniserOf(name=NAME, make=_synchroniser),
)
