"""What a checkpoint says beside its tensors, and which run may go on from it. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.errors import InputError, RunError, Violation
from weft.training.manifest import FORMAT, canonical

STATE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The scalars of a checkpoint.

    Attributes:
        step: steps done.
        samples: samples trained on so far, the position in the ledger (`weft.training.sampler`).
        plan_id: the plan that trained the last step; any plan of the same job may go on.
        seed, model, precision, data: what makes a job; a run goes on only where they are the same. `model`
            and `data` are fingerprints.
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
        """The content of `state.json`."""
        return canonical({"format": FORMAT, **asdict(self)})


def read_state(path: Path) -> TrainingState:
    """The scalars of a verified checkpoint.

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
        Violation(
            where,
            f"saved with {name} {saved[name]}, this run has {value}; a run resumes with the same",
            str(saved[name]),
        )
        for name, value in expected.items()
        if saved[name] != value
    ]
    if violations:
        raise InputError(violations)


def _job(state: TrainingState) -> dict[str, object]:
    """What makes a job, by the name that a user gives it."""
    return {
        "model": state.model,
        "precision": state.precision,
        "seed": state.seed,
        "data": state.data,
    }
