"""Tiny decoders by their `model_type` in `transformers`."""

from __future__ import annotations

import json
from typing import Any

from decoder_files import tiny_config

from weft.describe.decoder_config import read_decoder
from weft.describe.decoder_row import ROWS
from weft.describe.model import ModelConfig


def tiny_decoder(model_type: str, *, switched: bool = False, **keys: Any) -> ModelConfig:
    """A tiny model that trains the rows of all tokens; `switched`: see `decoder_files.tiny_config`."""
    config = tiny_config(model_type, switched=switched, pad_token_id=None, **keys)
    record = json.loads(config.to_json_string(use_diff=False))
    return read_decoder(record, ROWS[model_type], f"tiny-{model_type}", model_type)
