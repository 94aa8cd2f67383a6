"""The memory of a layer's operators, which run one after the other, from moment to moment.

Backward passes of operators run in the opposite order. Each reads the gradient of its output, and makes those
of its input and its weight. Then it frees the tensors that it has kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from weft.describe.amount import Amount
from weft.describe.layer import Temporaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator between two tensors, in elements per sample.

    Attributes:
        read, made: its input and its output, each as large as its gradient; no `read` without a gradient.
        weight: its weight.
        keeps_input, keeps_output: True if its backward pass needs this tensor. The layer's own input stays
            in any case.
        more_bytes: bytes of other tensors that its backward pass needs, per sample.
    """

    read: int
    made: int
    weight: int = 0
    keeps_input: bool = False
    keeps_output: bool = False
    more_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class _Moment:
    """Elements and bytes of a sample, and elements of a weight's gradient."""

    elements: int = 0
    more_bytes: float = 0.0
    weight: int = 0

    def with_more(self, elements: int, more_bytes: float = 0.0) -> _Moment:
        return replace(self, elements=self.elements + elements, more_bytes=self.more_bytes + more_bytes)

    def covers(self, other: _Moment) -> bool:
        return (
            self.elements >= other.elements
            and self.more_bytes >= other.more_bytes
            and self.weight >= other.weight
        )


@dataclass(frozen=True, kw_only=True)
class OperatorMemory:
    """A layer's operators: those of a branch, and those that follow its sum with a shortcut.

    Attributes:
        kept_input: elements of the layer's input if this layer or its producer keeps them, else 0.
        branch: read the layer's input one after the other.
        shortcut: read the layer's input, too, behind the branch; none: the input itself is added.
        joined: read the sum; none without a shortcut.
    """

    kept_input: int
    branch: Sequence[Operator]
    shortcut: Sequence[Operator] = ()
    joined: Sequence[Operator] = ()

    @property
    def kept(self) -> Amount:
        """Return the elements that the layer keeps for its backward pass."""
        return Amount.of(self.kept_input + self._forward()[1].elements, batch=1)

    @property
    def kept_bytes(self) -> Amount:
        return Amount.of(self._forward()[1].more_bytes, batch=1)

    def temporaries(self) -> tuple[Temporaries, ...]:
        """Return the moments that may need most memory beside everything that the layer keeps.

        They are those of the backward pass, and of the forward pass that a recomputed layer runs before it.
        """
        forward, kept = self._forward()
        last = (self.joined or self.branch)[-1]
        # The gradient of the output waits. The output itself counts in the next layer, which is done.
        again = [one.with_more(last.made - kept.elements, -kept.more_bytes) for one in forward]
        return (*_largest(self._backward()), *_largest(again, again=True))

    def _forward(self) -> tuple[list[_Moment], _Moment]:
        """Return the moments of the forward pass, and the tensors that it leaves."""
        steps = _Steps()
        steps.forward(self.branch)
        if self.joined:
            steps.hold(self.branch[-1].made)
            steps.forward(self.shortcut)
            steps.hold(self.shortcut[-1].made if self.shortcut else 0)
            steps.hold(-self.branch[-1].made)
            steps.forward(self.joined, given=self.branch[-1].made)
            steps.hold(-self.shortcut[-1].made if self.shortcut else 0)
        return steps.moments, steps.held

    def _backward(self) -> list[_Moment]:
        """Return the moments of the backward pass."""
        steps = _Steps()
        last = (self.joined or self.branch)[-1]
        steps.hold(last.made if last.keeps_output else 0)
        if not self.joined:
            steps.backward(self.branch, last.made)
            return steps.moments
        steps.backward(self.joined, last.made)
        # Both branches read one gradient.
        gradient = self.branch[-1].made
        steps.hold(gradient)
        if self.shortcut:
            steps.backward(self.shortcut, 0)
            steps.hold(self.shortcut[0].read - gradient)
        steps.backward(self.branch, gradient if self.shortcut else 0)
        return steps.moments


@dataclass
class _Steps:
    """Passes of operators one after the other: the tensors held beside them, and the moments so far."""

    held: _Moment = field(default_factory=_Moment)
    moments: list[_Moment] = field(default_factory=list)

    def hold(self, elements: int, more_bytes: float = 0.0) -> None:
        self.held = self.held.with_more(elements, more_bytes)

    def forward(self, operators: Sequence[Operator], *, given: int = 0) -> None:
        """Run operators on a tensor of `given` elements; 0 for the layer's input."""
        before = False
        for one in operators:
            self.moments.append(self.held.with_more(given + one.made, one.more_bytes))
            self.hold(given if before or one.keeps_input else 0, one.more_bytes)
            given, before = one.made, one.keeps_output

    def backward(self, operators: Sequence[Operator], gradient: int) -> None:
        """Run backward passes from the gradient of the last output; 0 if it is held."""
        produced = [False, *(one.keeps_output for one in operators)]
        for one, is_kept in zip(reversed(operators), reversed(produced[:-1]), strict=True):
            self.moments.append(replace(self.held.with_more(gradient + one.read), weight=one.weight))
            freed = (one.made if one.keeps_output else 0) + (
                one.read if one.keeps_input and not is_kept else 0
            )
            self.hold(-freed, -one.more_bytes)
            gradient = one.read


def _largest(moments: Iterable[_Moment], *, again: bool = False) -> list[Temporaries]:
    """Return the moments that no other one covers, each once."""
    found: list[_Moment] = []
    for one in moments:
        if not any(other.covers(one) for other in found):
            found = [*(other for other in found if not one.covers(other)), one]
    return [
        Temporaries(
            elements=Amount.of(one.elements, batch=1),
            bytes=Amount.of(one.more_bytes, batch=1),
            weights=Amount.of(one.weight),
            again=again,
        )
        for one in found
    ]
