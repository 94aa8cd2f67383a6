"""Tasks by name; `package.module:Task` names a user's own task."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.describe.tasks import CLICKS, DOSES, MATCHING, MODALITIES, SEQUENCES
from weft.errors import InputError, Violation, require_choice
from weft.installed import imported
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
        return _imported(kind)(settings)
    require_choice("task.kind", kind, TASKS)
    return TASKS[kind](settings)


def hands_over(kind: str, task: Task) -> bool:
    """Return True if a rank hands the samples that it has read to other ranks of its node.

    weft's own tasks map prepared data into memory, which these ranks share, or draw samples from numbers.
    """
    return ":" in kind and not getattr(task, "mapped", False)


def _imported(kind: str) -> type[Task]:
    task: type[Task] = imported("task.kind", kind)
    missing = [method for method in ("batch", "loss") if not callable(getattr(task, method, None))]
    if missing:
        raise InputError(Violation("task.kind", f"{kind!r} is no task: it has no {' and no '.join(missing)}"))
    return task
