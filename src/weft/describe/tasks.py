"""The tasks that weft knows by name: which families of models they train, and on which data by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from weft.describe.families.own import FAMILY
from weft.describe.model import ModelConfig
from weft.errors import Violation


@dataclass(frozen=True, slots=True)
class KnownTask:
    """`families` are those whose inputs and outputs the task's batches and loss are made for.

    `language`: the targets are tokens, and the exponential of the loss is a perplexity.
    """

    families: tuple[str, ...]
    data: str
    language: bool


KNOWN_TASKS: Mapping[str, KnownTask] = MappingProxyType(
    {
        "causal-lm": KnownTask(families=("gpt", "llama"), data="python-stdlib", language=True),
        "masked-lm": KnownTask(families=("bert",), data="python-stdlib", language=True),
        "image-classification": KnownTask(
            families=("vit", "resnet", "vgg", "alexnet"), data="digits", language=False
        ),
    }
)


def default_task(model: ModelConfig) -> str:
    """Return the task that a model is made for, where nobody says otherwise."""
    return next(name for name, known in KNOWN_TASKS.items() if model.family in known.families)


def task_problems(kind: str, model: ModelConfig) -> list[Violation]:
    """Return one line when a known task cannot train the model; what is one's own is taken at its word."""
    task = KNOWN_TASKS.get(kind)
    if task is None or model.family in (*task.families, FAMILY):
        return []
    families = " and ".join(task.families)
    problem = f"{kind!r} trains models of {families}; {model.name} is of {model.family}"
    return [Violation("task.kind", problem, default_task(model))]
