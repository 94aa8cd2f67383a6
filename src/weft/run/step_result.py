"""`StepResult`: the numbers of one step, which the host reads when they are there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from weft.errors import RunError
from weft.run.executor import Outcome
from weft.run.methods import MethodState
from weft.run.streams import THERE, Completion, Value
from weft.run.transport.gone import Gone


@dataclass
class Numbers:
    """The numbers of one step that the host reads.

    Attributes:
        figures: numbers that methods report, by name.
        shares: one tensor per rank: its share of the loss, then its shares of other numbers.
        exchange: fills the shares; None if they are there.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    shares: Sequence[torch.Tensor] = ()
    exchange: dist.Work | None = None

    def read(self, outcome: Outcome, group: dist.ProcessGroup, methods: Iterable[MethodState]) -> None:
        """Read the numbers of an outcome, which are there, and begin their exchange; all ranks call it.

        Raises:
            RunError: if a method's figures end the training.
        """
        self.figures = {name: value.content.item() for name, value in outcome.figures.items()}
        for one in methods:
            one.require(self.figures)
        shares = [share.read() for share in (outcome.loss, *outcome.shares.values())]
        own = torch.tensor(shares, dtype=torch.float64)
        self.shares = [torch.empty_like(own) for _ in range(group.size())]
        self.exchange = dist.all_gather(self.shares, own, group=group, async_op=True)


@contextmanager
def named_step(step: int) -> Iterator[None]:
    """Let errors name the step."""
    try:
        yield
    except RunError as error:
        raise type(error)(f"step {step}: {error}") from error


class StepResult:
    """The results of one step. All ranks share the loss; reading it waits for the slowest rank.

    On an accelerator the step may still run: whoever reads a number waits for it.

    Args:
        numbers: complete when `read` has ended.
        shared: the names of the shares after that of the loss.
        gone: the ranks that are gone, which errors name.
        independent: replicas step by themselves, so that one can be lost without the others.
    """

    def __init__(
        self,
        step: int,
        numbers: Numbers,
        read: Completion = THERE.completion,
        series: Mapping[str, Value[torch.Tensor]] | None = None,
        shared: Sequence[str] = (),
        gone: Gone | None = None,
        independent: bool = False,
    ) -> None:
        self.step = step
        self._numbers = numbers
        self._read = read
        self._series = dict(series or {})
        self._shared = tuple(shared)
        self._gone = gone or Gone()
        self._independent = independent

    @property
    def figures(self) -> dict[str, float]:
        """Numbers that methods report on the step, by name."""
        return dict(self._waited().figures)

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the whole gradient before clipping; None if the program does not compute it."""
        return self.figures.get("gradient_norm")

    @property
    def left_out(self) -> bool:
        """True if no rank stepped, because the gradient was not finite."""
        return self.gradient_norm is not None and not math.isfinite(self.gradient_norm)

    @property
    def series(self) -> dict[str, list[float]]:
        """Rows of numbers that methods report on the step, by name; reading them waits like the loss."""
        for value in self._series.values():
            value.completion.wait()
        return {name: value.content.tolist() for name, value in self._series.items()}

    @property
    def loss(self) -> float:
        """Mean loss over the samples of the global batch."""
        return self._total(0)

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        """The ranks with a loss that is not finite, if those of other independent replicas are finite."""
        losses = [share[0].item() for share in self._wait_for_shares().shares]
        lost = tuple(rank for rank, loss in enumerate(losses) if not math.isfinite(loss))
        # A rank without the last stage has the share 0.
        others = any(loss != 0.0 for loss in losses if math.isfinite(loss))
        return lost if self._independent and others else ()

    @property
    def totals(self) -> dict[str, float]:
        """The sums over all ranks of methods' numbers, by name; reading them waits like the loss."""
        return {name: self._total(place) for place, name in enumerate(self._shared, 1)}

    def _total(self, place: int) -> float:
        numbers = self._wait_for_shares()
        # The sum goes in the order of the ranks: all ranks and all repetitions read the same bits.
        return sum(share[place].item() for share in numbers.shares)

    def _wait_for_shares(self) -> Numbers:
        numbers = self._waited()
        if numbers.exchange is not None:
            with named_step(self.step), self._gone.named():
                numbers.exchange.wait()
            numbers.exchange = None
        return numbers

    def _waited(self) -> Numbers:
        with named_step(self.step), self._gone.named():
            self._read.wait()
        return self._numbers
