"""The tokenizer of a run in the files that `transformers.AutoTokenizer` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode


def byte_tokenizer_files(sequence: int) -> Mapping[str, str]:
    """Files by name of `weft.training.tokenizers.ByteTokenizer`: the id of a token is its byte.

    It is written as byte-level BPE without merges. The id 0 that ends a document is not among its special
    tokens: as one it would also be found where a text holds the character that stands for byte 0.

    Args:
        sequence: the most tokens that the model takes.
    """
    texts: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    tokenizer = Tokenizer(BPE(vocab={text: byte for byte, text in texts.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": sequence,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=2, sort_keys=True) + "\n",
    }
