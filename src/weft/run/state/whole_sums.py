"""`WholeSumsOptimizer`: an optimizer whose step needs sums over whole parameter tensors.

Ranks may step a piece of a tensor each. So the step has parts. A part ends with sums over the own pieces, and
the next part begins with the sums of all ranks. Weft runs the parts and adds up the sums in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence

import torch

from weft.describe.optimizers import OptimizerWork, declared_work
from weft.describe.plan import GRADIENT_NORM, Plan
from weft.errors import InputError, RunError, Violation
from weft.run.state.votes import VotedOptimizer

Parts = Generator[torch.Tensor, torch.Tensor, None]


class WholeSumsOptimizer(VotedOptimizer, ABC):
    """An optimizer that yields sums over its tensors and continues with those of whole tensors.

    A class attribute `weft_work` states under `whole_sums` the number of sums of every yield.
    """

    _begun: Parts | None = None

    @abstractmethod
    def parts(self) -> Parts:
        """Run one step; yield sums, shape (sums, parameters), and receive those over whole tensors.

        A column belongs to a parameter, in the order of `param_groups`. Sums are fp64 on the parameters'
        device. A step that `left_out` forbids changes neither parameters nor states. Parts may run on
        different streams, so a part uses no temporary tensor of an earlier one.
        """

    def sums(self, whole: torch.Tensor | None = None) -> torch.Tensor:
        """Run the next part of a step and return its sums; `whole` are those after the part before."""
        if whole is None:
            self._begun = self.parts()
            return next(self._begun)
        assert self._begun is not None, "the first part begins the step"
        return self._begun.send(whole)

    def step(  # type: ignore[override]  # torch's own has overloads for closures
        self, closure: Callable[[], float] | None = None, *, whole: torch.Tensor | None = None
    ) -> None:
        """Finish a step with the last sums of whole tensors, or step alone if all tensors are whole.

        Raises:
            RunError: if the begun step needs more sums than weft has exchanged.
        """
        alone = whole is None
        sums = self.sums() if whole is None else whole
        try:
            sums = self.sums(sums)
            while alone:
                sums = self.sums(sums)
        except StopIteration:
            self._begun = None
            return
        raise RunError(f"{type(self).__name__} needs more sums in a step than its weft_work states")

    @property
    def tensors(self) -> Sequence[torch.nn.Parameter]:
        """All parameters, in the order of the columns of sums."""
        return [parameter for group in self.param_groups for parameter in group["params"]]


def needs_of(optimizer: torch.optim.Optimizer) -> OptimizerWork:
    """Return the declared work of an optimizer; an empty one without a declaration."""
    return declared_work(optimizer, type(optimizer).__name__) or OptimizerWork()


def require_counted(optimizers: Iterable[torch.optim.Optimizer], plan: Plan, *, norm: bool) -> None:
    """Refuse optimizers that need other sums than the plan counts, or a `norm` that no rank takes.

    Raises:
        InputError: one line for every kind of optimizer and problem.
    """
    problems, counted = [], plan.optimizer.whole_sums
    for kind, one in {type(one): one for one in optimizers}.items():
        needs = needs_of(one)
        sums = needs.whole_sums if isinstance(one, WholeSumsOptimizer) else ()
        if sums != counted:
            said = f"{kind.__name__} adds up {_numbers(sums)} over whole tensors, the plan counts"
            problems.append(Violation("plan: optimizer", f"{said} {_numbers(counted)}; plan the run again"))
        if needs.orthogonalisations != plan.optimizer.orthogonalisations:
            said = f"{kind.__name__} orthogonalises {needs.orthogonalisations} times, the plan counts"
            problem = f"{said} {plan.optimizer.orthogonalisations}; plan the run again"
            problems.append(Violation("plan: optimizer", problem))
        if needs.unit_gradient and not norm:
            problem = f"{kind.__name__} divides gradients by their norm, so the plan needs the method"
            problems.append(Violation("plan: optimizer", problem, GRADIENT_NORM))
    if problems:
        raise InputError(problems)


def _numbers(sums: Sequence[int]) -> str:
    return " + ".join(map(str, sums)) + " numbers" if sums else "nothing"
