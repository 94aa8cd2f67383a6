"""Commands about weights: `export`, `import`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.output import Flag, Json, NewFolder, print_json, progressing
from weft.describe.units import counted, format_bytes
from weft.run.launch.workers import require_torch

if TYPE_CHECKING:
    from weft.training.interchange.hugging_face import WrittenFolder


def export(
    run: Path,
    out: NewFolder,
    /,
    *,
    checkpoint: int | None = None,
    replay: int | None = None,
    adapter: Flag = False,
    json: Json = False,
) -> None:
    """Write the weights of a run as a folder that transformers loads; low-rank products are merged.

    - `weft export runs/demo gpt-demo`

    Parameters
    ----------
    run
        The directory of a run that has saved a checkpoint.
    out
        The folder to write; it must not exist.
    checkpoint
        The step of the checkpoint; default: the newest complete checkpoint.
    replay
        Instead of a checkpoint's weights, those with which all replicas compute this step, from the log that
        checkpoint.weight_log keeps.
    adapter
        Write the low-rank products of [lora] alone, as a folder that peft loads.
    """
    require_torch()
    from weft.training.interchange.export import export as write_export

    with progressing("exporting") as report:
        exported = write_export(
            run, out, checkpoint=checkpoint, replay=replay, adapter=adapter, report=report
        )
    for reason in exported.skipped:
        print(f"weft: skipped a checkpoint: {reason}", file=sys.stderr)
    _answer(exported.folder, exported.checkpoint, {"checkpoint": exported.checkpoint}, json)


def import_(source: Path, out: NewFolder, /, *, model: str, json: Json = False) -> None:
    """Convert another trainer's checkpoint for runs and transformers.

    A checkpoint in torch's own format contains a pickle, which may name any function. Only names of the
    format itself are admitted, and none is called.

    - `weft import outputs/checkpoint llama --model llama/config.json`

    Parameters
    ----------
    source
        A folder written by torch.distributed.checkpoint, or a folder of safetensors files. If it has such
        folders called step-N, the newest counts. Tensors have the names of transformers, or of
        torchtitan's Llama.
    out
        The folder to write; it must not exist.
    model
        The model of these weights: a preset, a folder with a config.json, or such a file.
    """
    require_torch()
    from weft.training.interchange.imports import import_weights

    written, others = import_weights(source, out, model)
    left_out = f"left out: {others} other entries" if others else "nothing left out"
    _answer(written, left_out, {"left_out": others}, json)


def _answer(written: WrittenFolder, remark: str, more: Mapping[str, int | str], json: bool) -> None:
    if json:
        record = {"tensors": written.tensors, "files": written.files, "tensor_bytes": written.tensor_bytes}
        print_json({"path": str(written.path), **record, **more})
        return
    amount = (
        f"{counted(written.tensors, 'tensor')}, {format_bytes(written.tensor_bytes)}, files: {written.files}"
    )
    print(f"wrote {written.path}: {amount}; {remark}")
