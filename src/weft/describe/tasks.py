"""The tasks that weft knows by name: their families of models, and their default data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from weft.describe.decoder_row import TRAINED
from weft.describe.families import captured
from weft.describe.families.own import FAMILY
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation

# A source of data, or several with their weights.
Data = str | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class KnownTask:
    """A task; its batches and loss suit the inputs and outputs of models in `families`.

    `data`: the default of `task.data`; empty if there is none.
    `language`: the targets are tokens, and the exponential of the loss is a perplexity.
    """

    families: tuple[str, ...]
    data: str
    language: bool


# The tasks of decoders: all text, and the answers in conversations.
DECODING, CHAT = "causal-lm", "chat"
# Those of models with several inputs, and their data: functions of random numbers.
MODALITIES, CLICKS, DOSES = "multimodal-classification", "click-prediction", "dose-response"
SEQUENCES = "sequence-to-sequence"
MATCHING = "image-text-matching"
DRAWN = (MODALITIES, CLICKS, DOSES, SEQUENCES)
SYNTHETIC = "synthetic"
# Those whose samples hold documents that attention can be kept inside.
PACKED = (DECODING, CHAT)
KNOWN_TASKS: Mapping[str, KnownTask] = MappingProxyType(
    {
        DECODING: KnownTask(families=("gpt", *TRAINED), data="python-stdlib", language=True),
        CHAT: KnownTask(families=("gpt", *TRAINED), data="", language=True),
        "masked-lm": KnownTask(families=("bert",), data="python-stdlib", language=True),
        "image-classification": KnownTask(
            families=("vit", "resnet", "vgg", "alexnet"), data="digits", language=False
        ),
        MODALITIES: KnownTask(families=("multimodal-transformer",), data=SYNTHETIC, language=False),
        CLICKS: KnownTask(families=("dlrm",), data=SYNTHETIC, language=False),
        MATCHING: KnownTask(families=("image-text", "clip"), data="digits", language=False),
        SEQUENCES: KnownTask(families=("encoder-decoder", "t5"), data=SYNTHETIC, language=False),
        DOSES: KnownTask(families=("candle-uno",), data=SYNTHETIC, language=False),
    }
)


def sources_of(data: Data) -> Mapping[str, float]:
    """Return the sources of data with their weights."""
    return {data: 1.0} if isinstance(data, str) else data


def only_source(data: Data) -> str:
    """Return the source of data.

    Raises:
        InputError: if there are several.
    """
    sources = list(sources_of(data))
    if len(sources) > 1:
        problem = f"{len(sources)} sources; only causal-lm and masked-lm blend sources"
        raise InputError(Violation("task.data", problem, sources[0]))
    return sources[0]


def is_language(kind: str) -> bool:
    """Return True for a known task whose targets are tokens."""
    return kind in KNOWN_TASKS and KNOWN_TASKS[kind].language


def default_task(model: ModelConfig) -> str:
    """Return the default task of a model; that of all decoders is one, as is that of captured models."""
    if model.decoder is not None or model.family == captured.FAMILY:
        return DECODING
    return next(name for name, known in KNOWN_TASKS.items() if model.family in known.families)


def packing_problems(model: ModelConfig) -> list[Violation]:
    """Return one violation for a user's own model: weft cannot keep its attention inside documents."""
    if model.family != FAMILY:
        return []
    problem = f"{model.name} is a model of your own, whose attention weft does not know"
    return [Violation("task.packing", problem, "false")]


def task_problems(kind: str, model: ModelConfig) -> list[Violation]:
    """Return one violation if a known task cannot train the model; user-defined tasks are not checked."""
    task = KNOWN_TASKS.get(kind)
    if (
        task is None
        or model.family in (*task.families, FAMILY, captured.FAMILY)
        or default_task(model) == kind
    ):
        return []
    problem = f"{kind!r} trains no models of the family {model.family}, as {model.name} is"
    return [Violation("task.kind", problem, default_task(model))]
