"""`WholeMatricesOptimizer`: an optimizer whose update of a matrix needs the whole matrix.

Its step has two parts. The first one leaves in the gradients of matrices what each is to be made of, element
by element. Whoever has a whole matrix then completes it, and the second part moves the weights by the
results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from weft.run.state.votes import VotedOptimizer


class WholeMatricesOptimizer(VotedOptimizer, ABC):
    """An optimizer with groups of matrices, those whose option `orthogonalises` is True.

    A class attribute `weft_work` states under `orthogonalisations` how often it multiplies each out.
    """

    @abstractmethod
    def begin(self) -> None:
        """Run the first part of a step, on any pieces of matrices."""

    @abstractmethod
    def complete(self, matrix: torch.Tensor) -> None:
        """Make the update of what the first part left of a whole matrix, in place.

        Args:
            matrix: shape (rows, columns), or (matrices, rows, columns) for several.
        """

    @abstractmethod
    def finish(self) -> None:
        """Run the second part of a step, on any pieces."""

    def step(  # type: ignore[override]  # torch's own has overloads for closures
        self, closure: Callable[[], float] | None = None, *, begun: bool = False
    ) -> None:
        """Finish a begun step with completed matrices, or step alone if all tensors are whole."""
        if not begun:
            self.begin()
            for matrix in self.matrices:
                assert matrix.grad is not None, "it is stepped"
                self.complete(matrix.grad)
        self.finish()

    @property
    def matrices(self) -> Sequence[torch.nn.Parameter]:
        """The stepped matrices, or pieces of them."""
        return [matrix for _, matrix in self.in_groups()]

    def in_groups(self) -> Iterator[tuple[Mapping[str, Any], torch.nn.Parameter]]:
        """Yield the stepped matrices, each with the options of its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["orthogonalises"] and parameter.grad is not None:
                    yield group, parameter
