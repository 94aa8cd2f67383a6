"""Folders in the format of `transformers`: `config.json`, safetensors, an index, a tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from weft.describe.model import ModelConfig
from weft.describe.models import CONFIG_FILE
from weft.describe.reading import read_json
from weft.describe.units import shown
from weft.destinations import require_new
from weft.errors import InputError, RunError, Violation
from weft.files import building_folder, write_whole
from weft.progress import CountedWork, ProgressReport, unwatched
from weft.training.checkpoint.tensor_folders import TensorFolder
from weft.training.interchange.adapters import Adapter
from weft.training.interchange.hugging_face_families import HuggingFaceFamily, family_of_files
from weft.training.interchange.matching import Weights
from weft.training.interchange.weight_files import INDEX, SUFFIX, WHOLE

# A file of the folder is written from memory at once, so this bounds the memory of an export.
FILE_BYTES = 2_000_000_000

_ADAPTER_CONFIG, _ADAPTER = "adapter_config.json", "adapter_model.safetensors"


# Different names of one function.
_SAME = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}


@dataclass(frozen=True, slots=True)
class WrittenFolder:
    """A written folder: the counts of its tensors and safetensors files, and the bytes of its tensors."""

    path: Path
    tensors: int
    files: int
    tensor_bytes: int


def write_folder(
    path: Path,
    config: ModelConfig,
    weights: Weights,
    *,
    extra_files: Mapping[str, str] | None = None,
    file_bytes: int = FILE_BYTES,
    report: ProgressReport = unwatched,
) -> WrittenFolder:
    """Write a folder that `from_pretrained` of `transformers` loads, whole or not at all.

    Tensors are read one by one and kept until a file is full, so memory holds at most one file.

    Args:
        extra_files: further text files by name, such as the tokenizer's.
        file_bytes: the largest number of tensor bytes in a file; a larger tensor has a separate file.
        report: called with the parameters that are read, and again when they are written.

    Raises:
        InputError: if the path exists, the family has no such folder, or a tensor cannot be read.
        RunError: if the disk is full or cannot be written; no files stay.
    """
    family = family_of_files(config)
    with _new_folder(path) as folder:
        for name, text in (extra_files or {}).items():
            write_whole(folder / name, text)
        written = _write_model(folder, config, family, weights, file_bytes, report)
    return replace(written, path=path)


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Make a folder whole or not at all: yield the place to write its files.

    Raises:
        InputError: if the path exists.
        RunError: if the disk is full or cannot be written; no files stay.
    """
    require_new(path)
    try:
        with building_folder(path) as folder:
            yield folder
    except OSError as error:
        raise RunError(f"{path}: not written: {error.strerror or error}") from error
    except SafetensorError as error:
        raise RunError(f"{path}: not written: {error}") from error


def write_adapter(
    path: Path, adapter: Adapter, source: TensorFolder, base: Path, extra_files: Mapping[str, str]
) -> WrittenFolder:
    """Write a folder that `peft.PeftModel.from_pretrained` loads, whole or not at all.

    Args:
        base: the folder of the frozen model.
        extra_files: further text files by name, such as the tokenizer's.

    Raises:
        InputError: if the path exists, or a tensor cannot be read.
        RunError: if the disk is full or cannot be written; no files stay.
    """
    tensors = {name: source.read(kept).contiguous() for name, kept in adapter.names.items()}
    record = {"base_model_name_or_path": str(base), **adapter.configuration}
    with _new_folder(path) as folder:
        for name, text in extra_files.items():
            write_whole(folder / name, text)
        save_file(tensors, folder / _ADAPTER, metadata={"format": "pt"})
        write_whole(folder / _ADAPTER_CONFIG, json.dumps(record, indent=2, sort_keys=True) + "\n")
    size = sum(tensor.nbytes for tensor in tensors.values())
    return WrittenFolder(path=path, tensors=len(tensors), files=1, tensor_bytes=size)


def _write_model(
    folder: Path,
    config: ModelConfig,
    family: HuggingFaceFamily,
    weights: Weights,
    file_bytes: int,
    report: ProgressReport,
) -> WrittenFolder:
    places: dict[str, int] = {}
    total, count, precision = 0, 0, torch.float32
    parameters = sum(map(math.prod, weights.shapes.values()))
    counted = CountedWork(report, "writing", 2 * parameters, "parameters read and written")
    for count, part in enumerate(_parts(weights, family, file_bytes, counted), start=1):
        save_file(part, _numbered(folder, count), metadata={"format": "pt"})
        counted.finish(sum(tensor.numel() for tensor in part.values()))
        places |= dict.fromkeys(part, count)
        total += sum(tensor.nbytes for tensor in part.values())
        precision = next(iter(part.values())).dtype
    _name_files(folder, count, places, total)
    write_whole(folder / CONFIG_FILE, _configuration_text(config, family, precision))
    return WrittenFolder(path=folder, tensors=len(places), files=count, tensor_bytes=total)


def _configuration_text(config: ModelConfig, family: HuggingFaceFamily, precision: torch.dtype) -> str:
    """Return the text of the configuration; a model from a file keeps the keys that training leaves alone."""
    if not config.record:
        made = family.configuration(config)
        made.architectures = [family.architecture]
        made.dtype = precision
        return str(made.to_json_string())
    record = json.loads(config.record)
    # The name of this key in older versions.
    record.pop("torch_dtype", None)
    record |= {"architectures": [family.architecture], "dtype": str(precision).removeprefix("torch.")}
    if family.positions_key:
        record[family.positions_key] = config.sequence
    return json.dumps(record, indent=2, sort_keys=True) + "\n"


def require_same_function(path: Path, config: ModelConfig) -> None:
    """Refuse a `config.json` of a model that computes another function of the same weights.

    Raises:
        InputError: one line per key, with the value of the family's stages.
    """
    family = family_of_files(config)
    ours = family.configuration(config)
    given = type(ours).from_dict(read_json(path))
    problems = [
        Violation(f"{path}: {key}", f"{shown(theirs)} is not what this model computes", str(mine))
        for key in family.function
        if _spelled(theirs := getattr(given, key)) != _spelled(mine := getattr(ours, key))
    ]
    if problems:
        raise InputError(problems)


def _parts(
    weights: Weights, family: HuggingFaceFamily, file_bytes: int, counted: CountedWork
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each file by stored name."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for name in weights.shapes:
        for stored, tensor in family.stored_tensors(name, weights.read(name).contiguous()):
            if part and size + tensor.nbytes > file_bytes:
                yield part
                part, size = {}, 0
            part[stored] = tensor
            size += tensor.nbytes
            counted.finish(tensor.numel())
    yield part


def _numbered(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}{SUFFIX}"


def _name_files(folder: Path, count: int, places: Mapping[str, int], total: int) -> None:
    """Give the files their final names, which include their number, and write the index of several files."""
    if count == 1:
        _numbered(folder, 1).rename(folder / WHOLE)
        return
    names = {number: f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)}
    for number, name in names.items():
        _numbered(folder, number).rename(folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: names[number] for name, number in places.items()},
    }
    write_whole(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


def _spelled(value: Any) -> Any:
    return _SAME.get(value, value) if isinstance(value, str) else value
