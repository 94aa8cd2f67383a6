"""The scalars of a checkpoint, and the check that a run may resume from it. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from weft.errors import InputError, RunError, Violation
from weft.training.checkpoint.manifest import FORMAT, canonical
from weft.training.data.sampler import StepSamples

STATE = "state.json"
PRECISION = "precision"
FROZEN = "frozen weights"
OPTIMIZER = "optimizer states"
# Values that nobody gives as they are, such as fingerprints, so none is near.
_NOT_GIVEN = ("model", "data", FROZEN, OPTIMIZER)
# The precisions in which a run may resume, by the saved precision. They step in numbers that hold all saved
# numbers exactly. Runs of 16 bits step and save fp32 masters.
_FP32_STEPS = ("fp32", "bf16", "fp16", "fp64")
EXACT_IN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {**dict.fromkeys(("fp32", "bf16", "fp16"), _FP32_STEPS), "fp64": ("fp64",)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The scalars of a checkpoint.

    Attributes:
        step: steps done, with any global batches.
        samples: samples trained on so far, the position in the ledger (`weft.training.data.sampler`).
        plan_id: the plan that trained the last step; any plan of the same job may resume.
        seed, model, data: the identity of a job, the same in a resume; `model`, `data` are fingerprints.
        precision: the plan's precision; a run may resume in those of `EXACT_IN`.
        frozen: fingerprint of the folder with frozen weights, which a checkpoint lacks; empty without one.
        optimizer: the kind of its states (`states_of`); empty if it has none, or an earlier version saved.
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
    frozen: str = ""
    optimizer: str = ""

    def record(self) -> bytes:
        """Return the content of `state.json`."""
        return canonical({"format": FORMAT, **asdict(self)})

    def origin(self, steps: StepSamples) -> int:
        """Return the ledger position of step 0 such that the next step begins at `samples`.

        Step s takes the samples from `origin + steps.before(s)` on. The origin is negative if earlier steps
        were smaller; no step begins there.
        """
        return self.samples - steps.before(self.step)


def read_state(path: Path) -> TrainingState:
    """Return the scalars of a verified checkpoint.

    Raises:
        RunError: if the file is not a training state of this format.
    """
    try:
        record = json.loads((path / STATE).read_bytes())
        if record.pop("format") != FORMAT:
            raise ValueError("another format")
        return TrainingState(**record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RunError(f"{path / STATE}: not a training state of format {FORMAT}") from None


def require_same_job(expected: TrainingState, saved: TrainingState, where: str) -> None:
    """Refuse to resume from a checkpoint of another job; another plan of the same job may resume.

    Raises:
        InputError: one line per difference.
    """
    refuse_differences(job_of_state(expected), job_of_state(saved), where)


def require_steps_left(expected: TrainingState, saved: TrainingState, steps: int) -> None:
    """Refuse fewer steps than a run has done, and another plan for a run without remaining steps.

    Raises:
        InputError: naming the steps.
    """
    if saved.step > steps:
        raise InputError(Violation("train.steps", f"{steps}; {saved.step} are done", str(saved.step)))
    if expected.plan_id != saved.plan_id and saved.step >= steps:
        problem = f"{steps}; {saved.step} are done, so that nothing is left to train under another plan"
        raise InputError(Violation("train.steps", problem, str(saved.step + 1)))


def refuse_differences(expected: Mapping[str, object], saved: Mapping[str, object], where: str) -> None:
    """Refuse to resume if a run's job differs from the `saved` one; see `EXACT_IN` for the precision.

    Raises:
        InputError: one line per difference.
    """
    violations = [
        Violation(
            where, _difference(name, value, saved[name]), "" if name in _NOT_GIVEN else str(saved[name])
        )
        for name, value in expected.items()
        if saved[name] != value and not _goes_on(name, value, saved[name])
    ]
    if violations:
        raise InputError(violations)


def _goes_on(name: str, value: object, saved: object) -> bool:
    """Return True if a run may go on with another value than the saved one."""
    if name == OPTIMIZER:
        return saved == ""
    return name == PRECISION and value in EXACT_IN.get(str(saved), ())


def _difference(name: str, value: object, saved: object) -> str:
    if name == "data":
        return f"saved with other data (fingerprint {saved}, now {value}); a run resumes with the same"
    if name == "model":
        return f"saved with other layers (fingerprint {saved}, now {value}); a run resumes with the same"
    why = "which rounds the weights" if name == PRECISION else "a run resumes with the same"
    return f"saved with {name} {saved}, this run has {value}{', ' if name == PRECISION else '; '}{why}"


def job_of_state(state: TrainingState) -> dict[str, object]:
    """Return the values that identify a job, by the user's names for them."""
    return {
        "model": state.model,
        PRECISION: state.precision,
        "seed": state.seed,
        "data": state.data,
        FROZEN: state.frozen,
        OPTIMIZER: state.optimizer,
    }
