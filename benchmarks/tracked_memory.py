"""The predicted peak of a training step beside the peak that torch tracks over fake tensors.

The tracked peaks also judge the stated chances. Devices get from 0.9 to 1.1 of each peak. Of those with a
chance near 90 %, about as many must have enough.

python benchmarks/tracked_memory.py            # all rows, half an hour of a core
python benchmarks/tracked_memory.py gpt bert   # these models
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from figures import Value
from harness import Report, parser
from tracked import FOREACH, TrackedStep, predicted, tracked

from weft.describe.convolutional_models import convolutional_config
from weft.describe.decoder_config import read_decoder
from weft.describe.decoder_row import ROWS
from weft.describe.loss_choice import Loss
from weft.describe.model import ModelConfig
from weft.describe.plan import RECOMPUTES
from weft.describe.prediction import chance_to_fit
from weft.predict.cost.residency import TRACKED_SPREAD

TARGET = 0.05
# Stated chances that are judged, and the limits of the share that must have fitted.
CALIBRATED = (0.85, 0.95)
DEGREES = (1, 2, 4, 8)
# The fused kernel runs on one tensor rank.
LOSSES: tuple[Loss, ...] = ("whole", "chunked", "fused")
# weft's own AdamW and SGD are torch's fused ones.
OPTIMIZERS = {"AdamW fused": "adamw", "AdamW foreach": FOREACH, "SGD": "sgd"}
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
# Of eight experts, each token goes to two.
MIXTRAL = read_decoder(
    {
        "model_type": "mixtral",
        "hidden_size": BASE.hidden,
        "intermediate_size": 1408,
        "num_hidden_layers": 2,
        "num_attention_heads": BASE.heads,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": BASE.vocabulary,
        "max_position_embeddings": BASE.sequence,
    },
    ROWS["mixtral"],
    "tracked",
    "mixtral",
)
MODELS = {
    "gpt": BASE,
    "llama": replace(BASE, family="llama", feed_forward=1408),
    "llama, grouped keys": replace(BASE, family="llama", feed_forward=1408, key_value_heads=2, heads=8),
    "mixtral": MIXTRAL,
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


RECORDED = {
    "vocabulary": "vocab_size",
    "sequence": "max_position_embeddings",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
}


class StepBytes(NamedTuple):
    """Bytes of a step: the tracked peak, the predicted one, and those predicted between steps."""

    peak: int
    predicted: int
    resident: int


def models_of(name: str) -> Iterator[tuple[str, ModelConfig]]:
    """The model in the shapes that it has."""
    model = MODELS[name]
    yield name, model
    if not model.image_size:
        yield from ((f"{name}, {shape}", resized(model, **sizes)) for shape, sizes in SHAPES.items())


def resized(model: ModelConfig, **sizes: Any) -> ModelConfig:
    """The model in other sizes, which its own file says, too."""
    if not model.record:
        return replace(model, **sizes)
    record = json.loads(model.record) | {RECORDED[name]: size for name, size in sizes.items()}
    return read_decoder(record, ROWS[model.family], model.name, model.family)


def steps_of(model: ModelConfig) -> Iterator[tuple[str, TrackedStep]]:
    """All steps of a model that the runtime can run."""
    convolves = model.convolutions is not None
    fewest = min(model.heads, model.key_value_heads)
    for tensor_parallel in (1,) if model.image_size else [one for one in DEGREES if fewest % one == 0]:
        # Fake tensors know grouped products in bf16 only.
        for precision in ("bf16",) if has_experts(model) else ("fp32", "bf16"):
            for recompute in RECOMPUTES:
                if recompute == "selective" and convolves:
                    continue
                optimizers = [*OPTIMIZERS] if recompute == "none" else ["AdamW fused"]
                losses = LOSSES[:1] if model.image_size else LOSSES[: 3 if tensor_parallel == 1 else 2]
                for optimizer, loss in product(optimizers, losses):
                    words = [f"tp {tensor_parallel}", precision, f"recompute {recompute}", optimizer]
                    step = TrackedStep(
                        model=model,
                        precision=precision,
                        recompute=recompute,
                        tensor_parallel=tensor_parallel,
                        optimizer=OPTIMIZERS[optimizer],
                        loss=loss,
                    )
                    yield ", ".join([*words, *([] if loss == "whole" else [f"loss {loss}"])]), step


def has_experts(model: ModelConfig) -> bool:
    return model.decoder is not None and model.decoder.experts is not None


def options() -> argparse.ArgumentParser:
    made = parser(__doc__)
    made.add_argument("models", nargs="*", choices=[*MODELS, []], help="by default all")
    return made


def main() -> None:
    asked = options().parse_args()
    report = Report("tracked_memory", asked)
    report.print_machine()
    rows: list[StepBytes] = []
    for name in asked.models or MODELS:
        for words, model in models_of(name):
            for setting, step in steps_of(model):
                cell = f"{words}: {setting}"
                known = report.values(cell)
                if "resident" not in known:
                    known = measured(step)._asdict()
                    error = known["predicted"] / known["peak"] - 1.0
                    values = {name: Value(held, "bytes") for name, held in known.items()}
                    values["error"] = Value(error, "share", target=TARGET, met=abs(error) <= TARGET)
                    report.add_cell(cell, values)
                rows.append(StepBytes(*(round(known[name]) for name in StepBytes._fields)))
    largest = max(abs(row.predicted / row.peak - 1.0) for row in rows)
    report.add(f"largest error of {len(rows)}", Value(largest, "share", target=TARGET))
    errors = sorted(abs((row.predicted - row.resident) / (row.peak - row.resident) - 1.0) for row in rows)
    usual = errors[9 * len(errors) // 10]
    report.add("90 % of errors of bytes that come and go", Value(usual, "share", target=TRACKED_SPREAD))
    fit = share_that_fits(rows)
    low, high = CALIBRATED
    report.add("of chances of about 90 %, fit", Value(fit, "share", target=0.9, met=low <= fit <= high))


def measured(step: TrackedStep) -> StepBytes:
    found = predicted(step)
    return StepBytes(tracked(step).peak_bytes, found.peak_bytes, found.resident_bytes)


def share_that_fits(rows: Iterable[StepBytes]) -> float:
    """The share of devices with enough memory, among those with a stated chance in `CALIBRATED`."""
    enough = []
    for row in rows:
        high = row.predicted + TRACKED_SPREAD * (row.predicted - row.resident)
        for thousandths in range(900, 1101):
            capacity = row.peak * thousandths / 1000
            if CALIBRATED[0] <= chance_to_fit(row.predicted, high, capacity) <= CALIBRATED[1]:
                enough.append(capacity >= row.peak)
    return statistics.mean(enough)


if __name__ == "__main__":
    main()
