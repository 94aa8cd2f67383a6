"""Tasks by name; `package.module:Task` names a user's own task."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.describe.tasks import CLICKS, DOSES, MATCHING, MODALITIES, SEQUENCES
from weft.describe.units import shown
from weft.errors import InputError, RunError, Violation, require_choice
from weft.installed import failure
from weft.training.task_class import task_class
from weft.training.tasks.base import Task, TaskSettings
from weft.training.tasks.chat import Chat
from weft.training.tasks.drawn import (
    ClickPrediction,
    DoseResponse,
    MultimodalClassification,
    SequenceToSequence,
)
from weft.training.tasks.image_classification import ImageClassification
from weft.training.tasks.image_text import ImageTextMatching
from weft.training.tasks.text import CausalLanguageModelling, MaskedLanguageModelling

TASKS: Mapping[str, type[Task]] = MappingProxyType(
    {
        "causal-lm": CausalLanguageModelling,
        "chat": Chat,
        "masked-lm": MaskedLanguageModelling,
        "image-classification": ImageClassification,
        MODALITIES: MultimodalClassification,
        CLICKS: ClickPrediction,
        DOSES: DoseResponse,
        MATCHING: ImageTextMatching,
        SEQUENCES: SequenceToSequence,
    }
)


def make_task(kind: str, settings: TaskSettings) -> Task:
    """Return the task that a run file's `task.kind` names, with its data open.

    Raises:
        InputError: if there is no such task or it refuses the settings.
    """
    if ":" in kind:
        return _made(kind, settings)
    require_choice("task.kind", kind, TASKS)
    return TASKS[kind](settings)


def hands_over(kind: str, task: Task) -> bool:
    """Return True if a rank hands the samples that it has read to other ranks of its node.

    weft's own tasks map prepared data into memory, which these ranks share, or draw samples from numbers.
    """
    return ":" in kind and not getattr(task, "mapped", False)


def _made(kind: str, settings: TaskSettings) -> Task:
    """Return a task of the user's own with all that a run asks it for."""
    try:
        task: Task = task_class(kind)(settings)
    except (InputError, RunError):
        raise
    except Exception as error:
        problem = f"{kind!r} cannot be made: {failure(error)}"
        raise InputError(Violation("task.kind", problem)) from error
    problems = []
    for name in ("samples", "held_out_samples", "tokens_per_sample", "fingerprint"):
        value = getattr(task, name, None)
        wanted = "text" if name == "fingerprint" else "a positive integer"
        if not (type(value) is str if name == "fingerprint" else type(value) is int and value > 0):
            problem = f"{kind!r} has {name} = {shown(value)}: must be {wanted}"
            problems.append(Violation("task.kind", problem))
    if problems:
        raise InputError(problems)
    return task
