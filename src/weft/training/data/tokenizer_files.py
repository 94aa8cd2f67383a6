"""The files of a run's tokenizer for `transformers.AutoTokenizer`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

from weft.describe.run_tables.training import BYTES
from weft.training.data.tokenizer_json import SETTINGS_FILE, TOKENIZER_FILE, JsonTokenizer, tokenizer_file


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
