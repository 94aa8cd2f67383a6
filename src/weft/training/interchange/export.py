"""`weft export`: a run's weights, from any ranks, as a folder that `transformers` loads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

from weft.describe.added_layers import trained_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.describe.reading import read_text
from weft.describe.run_file import RunFile
from weft.describe.run_tables.training import BYTES, MODEL
from weft.describe.tasks import is_language
from weft.errors import InputError, Violation
from weft.progress import CountedWork, ProgressReport, unwatched
from weft.run.stage.build import build_stage
from weft.training.checkpoint.frozen_weights import frozen_fingerprint, weights_folder
from weft.training.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    generation_path,
    generations,
    newest_complete,
    verify,
)
from weft.training.checkpoint.tensor_folders import (
    CompletedFolder,
    DrawnWeights,
    SafetensorsFolder,
    TensorFolder,
)
from weft.training.checkpoint.training_state import read_state
from weft.training.checkpoint.weight_replay import replay as replayed_weights
from weft.training.data.tokenizer_json import SETTINGS_FILE, TOKENIZER_FILE, JsonTokenizer, tokenizer_file
from weft.training.data.tokenizers import fingerprint_of, get_tokenizer, tokenizer_name
from weft.training.directory.run_directory import RunDirectory
from weft.training.interchange.adapters import adapter_in, merged
from weft.training.interchange.hugging_face import FILE_BYTES, WrittenFolder, write_adapter, write_folder
from weft.training.interchange.imports import initial_weights
from weft.training.interchange.matching import match_weights

_GENERATION_FILE = "generation_config.json"
# Files beside `tokenizer.json` and its settings.
_TOKENIZER_FILES = (
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class Exported:
    """The written folder, its checkpoint, and one line for each newer checkpoint that is not whole."""

    folder: WrittenFolder
    checkpoint: str
    skipped: tuple[str, ...]


def export(
    run_dir: Path,
    out: Path,
    *,
    checkpoint: int | None = None,
    replay: int | None = None,
    adapter: bool = False,
    file_bytes: int = FILE_BYTES,
    report: ProgressReport = unwatched,
) -> Exported:
    """Write a checkpoint of a run as a folder for `transformers.AutoModelForCausalLM.from_pretrained`.

    The model's tensors keep their names and their precision. A tied head is left out, as in `transformers`.
    An adapter is merged with them. Other tensors that methods have added to the model are left out.

    Args:
        checkpoint: the step of the checkpoint; default: the newest whole one.
        replay: write the weights with which all replicas compute this step, from the run's log of weights.
        adapter: write the run's adapter alone, as a folder for `peft.PeftModel.from_pretrained`.
        file_bytes: the largest number of tensor bytes in one file.
        report: called with the checked bytes of the checkpoint, then as in `write_folder`.

    Raises:
        InputError: if there is no such run or checkpoint, its tensors are not the model's, or `out` exists;
            or if the log does not reach the step, or the run trains no adapter.
        RunError: if the checkpoint is damaged.
    """
    directory = RunDirectory(run_dir)
    directory.require()
    subject, file = directory.planned()
    run, config, plan = subject.run, subject.model, file.plan
    _require_same_model(config, plan, run_dir)
    source: TensorFolder
    if replay is None:
        path, skipped = _checkpoint(run_dir / CHECKPOINTS, checkpoint, report)
        source, name = SafetensorsFolder(path), path.name
    elif checkpoint is not None:
        raise InputError(Violation("replay", "it begins with a checkpoint that it finds", "no checkpoint"))
    else:
        replayed = replayed_weights(run_dir, plan, config, replay)
        source, skipped = replayed.folder, replayed.skipped
        name = f"{replayed.checkpoint}, replayed to step {replay}"
    graph = trained_graph(config, plan.methods)
    if graph.has_frozen_layers:
        source = _with_frozen(source, run, config, frozen_fingerprint(run, graph))
    # A task of the user's own may have any tokenizer, or none.
    others = _tokenizer_of(run, run_dir, config.sequence) if is_language(run.task.kind) else {}
    extra_files = {**_kept_files(run), **others}
    if adapter:
        written = write_adapter(out, adapter_in(source, config, plan), source, _base(run), extra_files)
    else:
        weights = match_weights(merged(source, config, plan), config, others=True)
        written = write_folder(
            out, config, weights, extra_files=extra_files, file_bytes=file_bytes, report=report
        )
    return Exported(written, name, tuple(skipped))


def _base(run: RunFile) -> Path:
    """Return the folder of the frozen weights; raise InputError if the run has drawn them."""
    folder = weights_folder(run)
    if folder is None:
        raise InputError(
            Violation("adapter", "its frozen weights come from the seed, not from a folder", "no --adapter")
        )
    return folder.absolute()


def _with_frozen(source: TensorFolder, run: RunFile, config: ModelConfig, fingerprint: str) -> TensorFolder:
    """Return a checkpoint's tensors and the frozen weights, which it lacks.

    Raises:
        InputError: if the folder of the frozen weights is no longer that of the checkpoint.
    """
    saved = read_state(source.path).frozen
    if saved != fingerprint:
        problem = f"weights {fingerprint or 'of a seed'}, the checkpoint is of {saved or 'a seed'}"
        raise InputError(
            Violation(str(weights_folder(run)), f"not the frozen weights of this run: {problem}")
        )
    folder = weights_folder(run)
    if folder is not None:
        return CompletedFolder(source, initial_weights(folder, config))
    drawn = build_stage(config, range(config.layers + 2), run.train.seed, torch.float32).state_dict()
    return CompletedFolder(source, DrawnWeights(drawn))


def _require_same_model(config: ModelConfig, plan: Plan, run_dir: Path) -> None:
    """Refuse a run whose plan file names no sizes, if the folder of its configuration has changed."""
    if trained_graph(config, plan.methods).fingerprint != plan.model_fingerprint:
        where = str(run_dir / "run.toml")
        raise InputError(Violation(where, f"{config.name} is no longer the model that this run trained"))


def _tokenizer_of(run: RunFile, run_dir: Path, sequence: int) -> Mapping[str, str]:
    """Return the files of the run's tokenizer; raise InputError if the tokenizer has changed."""
    name = tokenizer_name(run)
    told = [event for event in RunDirectory(run_dir).events() if "tokenizer_fingerprint" in event]
    if told and told[-1]["tokenizer_fingerprint"] != fingerprint_of(get_tokenizer(name)):
        raise InputError(Violation("task.tokenizer", f"{name} is no longer the tokenizer of this run"))
    return tokenizer_files(name, sequence)


def _kept_files(run: RunFile) -> Mapping[str, str]:
    """Return the files beside the model's configuration that training leaves alone.

    Those of a tokenizer belong to the run only if its tokens are the model's own.
    """
    if run.model.hf is None:
        return {}
    path = Path(run.model.hf)
    folder = path if path.is_dir() else path.parent
    own = run.task.tokenizer == MODEL
    names = (_GENERATION_FILE, *(_TOKENIZER_FILES if own else ()))
    return {name: read_text(folder / name) for name in names if (folder / name).is_file()}


def _checkpoint(directory: Path, step: int | None, report: ProgressReport) -> tuple[Path, Sequence[str]]:
    steps = [step for step, _ in generations(directory)]
    if not steps:
        raise InputError(Violation(str(directory), "no checkpoint yet"))
    if step is None:
        checked = _checking(generation_path(directory, max(steps)), report)
        newest, skipped = newest_complete(directory, checked.finish)
        assert newest is not None, "there are checkpoints, and `newest_complete` raises when none is whole"
        return newest, skipped
    if step not in steps:
        problem = f"no checkpoint of step {step}; there are {', '.join(map(str, sorted(steps)))}"
        raise InputError(Violation(str(directory), problem, str(min(steps, key=lambda one: abs(one - step)))))
    path = generation_path(directory, step)
    verify(path, _checking(path, report).finish)
    return path, []


def _checking(path: Path, report: ProgressReport) -> CountedWork:
    total = sum(file.stat().st_size for file in path.iterdir() if file.name != MANIFEST)
    return CountedWork(report, f"checking {path.name}", total, "bytes")


def tokenizer_files(name: str, sequence: int) -> Mapping[str, str]:
    """Return the files of a run's tokenizer by name (`weft.training.data.tokenizers.get_tokenizer`).

    Args:
        sequence: the largest number of tokens that the model takes.

    Raises:
        InputError: if its file is gone or broken.
    """
    if name == BYTES:
        return byte_tokenizer_files(sequence)
    path = Path(name).expanduser()
    tokenizer, file = JsonTokenizer.read(path), tokenizer_file(path)
    settings = file.with_name(SETTINGS_FILE)
    if settings.exists():
        described = settings.read_text(encoding="utf-8")
    else:
        described = _settings_text(sequence, eos_token=tokenizer.end_token)
    return {TOKENIZER_FILE: file.read_text(encoding="utf-8"), SETTINGS_FILE: described}


def byte_tokenizer_files(sequence: int) -> Mapping[str, str]:
    """Return the files of `weft.training.data.tokenizers.ByteTokenizer` by name; a token's id is its byte.

    The format is byte-level BPE without merges. The id 0, which ends a document, is not a special token.
    Otherwise the tokenizer would also find it in a text with the character that stands for byte 0.

    Args:
        sequence: the largest number of tokens that the model takes.
    """
    texts: dict[int, str] = bytes_to_unicode()
    tokenizer = Tokenizer(BPE(vocab={text: byte for byte, text in texts.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return {
        TOKENIZER_FILE: tokenizer.to_str(pretty=True) + "\n",
        SETTINGS_FILE: _settings_text(sequence, clean_up_tokenization_spaces=False),
    }


def _settings_text(sequence: int, **others: str | bool) -> str:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": sequence, **others}
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"
