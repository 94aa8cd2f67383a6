"""The predicted peak of a training step beside the peak that torch tracks over fake tensors.

python benchmarks/tracked_memory.py            # all rows, a few minutes
python benchmarks/tracked_memory.py gpt bert   # these models
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from figures import Value
from harness import Report, parser
from tracked import TrackedStep, predicted, tracked

from weft.describe.convolutional_models import convolutional_config
from weft.describe.loss_choice import Loss
from weft.describe.model import ModelConfig
from weft.describe.plan import RECOMPUTES

TARGET = 0.05
DEGREES = (1, 2, 4, 8)
LOSSES: tuple[Loss, ...] = ("whole", "chunked")
# Few targets and long samples, or many targets: the blocks or the loss decide the peak.
SHAPES = {"long": {"vocabulary": 1024, "sequence": 1024}, "many targets": {"vocabulary": 32000}}
BASE = ModelConfig(
    name="tracked",
    family="gpt",
    layers=3,
    hidden=512,
    heads=8,
    key_value_heads=8,
    feed_forward=2048,
    vocabulary=8192,
    sequence=256,
)
MODELS = {
    "gpt": BASE,
    "llama": replace(BASE, family="llama", feed_forward=1408),
    "llama, grouped keys": replace(BASE, family="llama", feed_forward=1408, key_value_heads=2, heads=8),
    "bert": replace(BASE, family="bert"),
    "vit": replace(
        BASE, family="vit", vocabulary=1000, sequence=197, image_size=224, patch_size=16, channels=3
    ),
    "resnet": convolutional_config(
        "tracked",
        family="resnet",
        channels=3,
        vocabulary=1000,
        hidden=64,
        widths=(256, 512),
        depths=(2, 2),
        image_size=128,
    ),
}


def models_of(name: str) -> Iterator[tuple[str, ModelConfig]]:
    """The model in the shapes that it has."""
    model = MODELS[name]
    yield name, model
    if not model.image_size:
        yield from ((f"{name}, {shape}", replace(model, **sizes)) for shape, sizes in SHAPES.items())


def steps_of(model: ModelConfig) -> Iterator[tuple[str, TrackedStep]]:
    """All steps of a model that the runtime can run."""
    convolves, losses = model.convolutions is not None, ("whole",) if model.image_size else LOSSES
    fewest = min(model.heads, model.key_value_heads)
    for tensor_parallel in (1,) if model.image_size else [one for one in DEGREES if fewest % one == 0]:
        for precision in ("fp32", "bf16"):
            for recompute in RECOMPUTES:
                if recompute == "selective" and convolves:
                    continue
                optimizers = ("adamw", "sgd") if recompute == "none" else ("adamw",)
                for optimizer, loss in product(optimizers, losses):
                    words = [f"tp {tensor_parallel}", precision, f"recompute {recompute}", optimizer]
                    step = TrackedStep(
                        model=model,
                        precision=precision,
                        recompute=recompute,
                        tensor_parallel=tensor_parallel,
                        optimizer=optimizer,
                        loss=loss,
                    )
                    yield ", ".join([*words, *([] if loss == "whole" else [f"loss {loss}"])]), step


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("models", nargs="*", choices=[*MODELS, []], help="by default all")
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("tracked_memory", asked)
    report.print_machine()
    errors: dict[str, float] = {}
    for name in asked.models or MODELS:
        for words, model in models_of(name):
            for setting, step in steps_of(model):
                cell = f"{words}: {setting}"
                known = report.values(cell)
                if "error" not in known:
                    peak_bytes = tracked(step).peak_bytes
                    error = predicted(step) / peak_bytes - 1.0
                    known = {"peak": peak_bytes, "error": error}
                    values = {
                        "peak": Value(peak_bytes, "bytes"),
                        "error": Value(error, "share", target=TARGET, met=abs(error) <= TARGET),
                    }
                    report.add_cell(cell, values)
                errors[cell] = abs(known["error"])
    largest = max(errors.values())
    report.add(f"largest error of {len(errors)}", Value(largest, "share", target=TARGET))


if __name__ == "__main__":
    main()
