"""What a checkpoint says beside its tensors, and which run may go on from it. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from weft.errors import InputError, RunError, Violation
from weft.training.checkpoint.manifest import FORMAT, canonical

STATE = "state.json"
PRECISION = "precision"
# The precisions in which a run may go on, by the one that it was saved with: those that step in numbers which
# hold all of its own. In bf16 it is fp32 masters that are stepped and saved.
EXACT_IN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"fp32": ("fp32", "bf16", "fp64"), "bf16": ("bf16", "fp32", "fp64"), "fp64": ("fp64",)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The scalars of a checkpoint.

    Attributes:
        step: steps done, of whatever global batches.
        samples: samples trained on so far, the position in the ledger (`weft.training.data.sampler`).
        plan_id: the plan that trained the last step; any plan of the same job may go on.
        seed, model, data: what makes a job; a run goes on only where they are the same. `model` and `data`
            are fingerprints.
        precision: of the plan; a run goes on in one that holds all of its numbers (`EXACT_IN`).
        first_loss: held-out loss before the first step, in nats per token.
    """

    step: int
    samples: int
    plan_id: str
    seed: int
    model: str
    precision: str
    data: str
    first_loss: float

    def record(self) -> bytes:
        """Return the content of `state.json`."""
        return canonical({"format": FORMAT, **asdict(self)})

    def origin(self, global_batch: int) -> int:
        """The position in the ledger from which steps of that size count, so that the next one goes on here.

        Step s takes the samples from `origin + s * global_batch` on. Below zero where the steps so far were
        smaller; no step begins there.
        """
        return self.samples - self.step * global_batch


def read_state(path: Path) -> TrainingState:
    """Return the scalars of a verified checkpoint.

    Raises:
        RunError: when weft did not write them.
    """
    try:
        record = json.loads((path / STATE).read_bytes())
        if record.pop("format") != FORMAT:
            raise ValueError("another format")
        return TrainingState(**record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RunError(f"{path / STATE}: not a training state of format {FORMAT}") from None


def require_same_job(expected: TrainingState, saved: TrainingState, where: str) -> None:
    """Refuse to go on from a checkpoint of another job; another plan of the same job may go on.

    Raises:
        InputError: one line per difference.
    """
    refuse_differences(_job(expected), _job(saved), where)


def require_steps_left(expected: TrainingState, saved: TrainingState, steps: int) -> None:
    """Refuse another plan for a run that has done its steps: nothing would be trained under it.

    Raises:
        InputError: naming the steps.
    """
    if expected.plan_id != saved.plan_id and saved.step >= steps:
        problem = f"{steps}; {saved.step} are done, so that nothing is left to train under another plan"
        raise InputError(Violation("train.steps", problem, str(saved.step + 1)))


def refuse_differences(expected: Mapping[str, object], saved: Mapping[str, object], where: str) -> None:
    """Refuse where a run that goes on would be another job than the one that was `saved`.

    Raises:
        InputError: one line per difference.
    """
    violations = [
        Violation(where, _difference(name, value, saved[name]), str(saved[name]))
        for name, value in expected.items()
        if saved[name] != value and not (name == PRECISION and value in EXACT_IN.get(str(saved[name]), ()))
    ]
    if violations:
        raise InputError(violations)


def _difference(name: str, value: object, saved: object) -> str:
    why = "which rounds the weights" if name == PRECISION else "a run resumes with the same"
    return f"saved with {name} {saved}, this run has {value}{', ' if name == PRECISION else '; '}{why}"


def _job(state: TrainingState) -> dict[str, object]:
    """What makes a job, by the name that a user gives it."""
    return {
        "model": state.model,
        PRECISION: state.precision,
        "seed": state.seed,
        "data": state.data,
    }
