"""The safetensors files of a folder that hold its weights. No torch here, so a check of files needs none.

The files are those of the index; without an index, `model.safetensors`; without both, all files.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from weft.describe.reading import read_json
from weft.describe.units import shown
from weft.errors import InputError, Violation

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
# A file begins with the size of its JSON header, which has the offset of each tensor.
_SIZE_BYTES = 8
_METADATA = "__metadata__"
_SAMPLED_BYTES = 4096
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def weight_files(path: Path) -> list[Path]:
    """Return the files with the weights, in the order of their names.

    Raises:
        InputError: if there are none, with the reason, or a file of the index is missing.
    """
    if not path.is_dir():
        raise InputError(Violation(str(path), "not a folder with safetensors files"))
    if (path / INDEX).exists():
        return _indexed(path)
    if (path / WHOLE).exists():
        return [path / WHOLE]
    found = sorted(path.glob(f"*{SUFFIX}"))
    if not found:
        raise InputError(Violation(str(path), _nothing(path)))
    return found


def weight_fingerprint(path: Path) -> str:
    """Return 16 digits for the weights of a folder: names, shapes, and some bytes of each tensor.

    All bytes of a large model take minutes to read. Training changes every tensor, and so its first bytes.

    Raises:
        InputError: as `weight_files`, or if a file is not of safetensors.
    """
    digest = hashlib.sha256()
    for file in weight_files(path):
        try:
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(_SIZE_BYTES), "little")
                if size > file.stat().st_size:
                    raise ValueError("its header is longer than the file")
                header = stream.read(size)
                digest.update(header)
                for name, entry in sorted(json.loads(header).items()):
                    if name != _METADATA:
                        stream.seek(_SIZE_BYTES + size + entry["data_offsets"][0])
                        digest.update(stream.read(_SAMPLED_BYTES))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(Violation(str(file), f"not a whole safetensors file: {error}")) from None
    return digest.hexdigest()[:16]


def _nothing(path: Path) -> str:
    if (path / ".metadata").exists():
        return "a checkpoint of torch's own format; make a folder of it: weft import FOLDER OUT --model NAME"
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        return (
            f"only pickled weights ({', '.join(pickles)}), which can run any program when they are read and "
            "are refused; transformers writes safetensors when it saves them"
        )
    return "no safetensors files in this folder"


def _indexed(path: Path) -> list[Path]:
    index = path / INDEX
    record = read_json(index)
    names = record.get("weight_map") if isinstance(record, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InputError(Violation(str(index), "no weight_map from names of tensors to names of files"))
    files = sorted(set(names.values()))
    problems = [
        Violation(str(index), f"{shown(name)}: no such file in the folder")
        for name in files
        if Path(name).name != name or not (path / name).is_file()
    ]
    if problems:
        raise InputError(problems)
    return [path / name for name in files]
