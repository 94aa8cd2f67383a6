"""Tokenizers of the `tokenizers` library, read from a `tokenizer.json` in the layout of `transformers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from weft.describe.reading import read_text
from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.training.data.chat_template import ChatTemplate
from weft.training.data.pieces import boundary
from weft.training.data.tokenizers import Ids

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
# The usual tokens that end a text or mask a token, for tokenizers without these settings.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
MASK_TOKENS = ("[MASK]", "<mask>")
# A longer document is encoded in parts: the library needs some hundred bytes per token during encoding.
PART_BYTES = 1 << 20


class JsonTokenizer:
    """The ids of a `tokenizer.json`, without tokens around a text, but with one at the end of a document.

    The name of a special token inside a document is ordinary text, so no document can end itself. Bytes that
    are not UTF-8 are read as U+FFFD. `end_token` is the text of the token that ends a document.

    Args:
        content: the bytes of the `tokenizer.json`.
        settings: the `tokenizer_config.json` in the same folder; empty if there is none.
        template: of the tokenizer's conversations.
        where: the file's name in refusals.

    Raises:
        InputError: if the library does not read the content, or no token can end a document.
    """

    reads_utf8 = True

    def __init__(
        self, content: bytes, settings: Mapping[str, Any], where: str, template: ChatTemplate | None = None
    ) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        # The library raises plain exceptions of several kinds.
        except Exception as error:
            raise _refusal(where, f"not a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise _refusal(where, "its vocabulary is empty")
        end = _first(ids, (_text(settings.get("eos_token")), *END_TOKENS))
        if end is None:
            known = ", ".join(END_TOKENS)
            problem = f"no token ends a document: name one as eos_token in {SETTINGS_FILE}, or have one of"
            raise _refusal(where, f"{problem} {known}")
        self.end = end
        end_token = self._tokenizer.id_to_token(end)
        assert end_token is not None, "it is of the vocabulary"
        self.end_token: str = end_token
        self.name = where
        self.vocabulary = max(ids.values()) + 1
        mask = _first(ids, (_text(settings.get("mask_token")), *MASK_TOKENS))
        self.mask = self.vocabulary if mask is None else mask
        self.key = f"json 1 {hashlib.sha256(content).hexdigest()} {end}"
        self.chat_template = template

    @classmethod
    def read(cls, path: Path) -> JsonTokenizer:
        """Return the tokenizer of a file, or of a folder that holds a `tokenizer.json`.

        Raises:
            InputError: if it cannot be read.
        """
        file = tokenizer_file(path)
        try:
            settings = _settings(file.with_name(SETTINGS_FILE))
            return cls(file.read_bytes(), settings, str(file), _template(file.parent, settings))
        except OSError as error:
            raise _refusal(str(file), f"cannot be read: {error.strerror}") from None

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        parts: list[str] = []
        ends: list[int] = []
        for document in documents:
            parts += [part.decode("utf-8", "replace") for part in _parts(document)]
            ends.append(len(parts))
        # The library spreads a batch over the cores.
        encoded = self._tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        starts = [0, *ends[:-1]]
        return [
            np.array([id_ for one in encoded[start:end] for id_ in one.ids] + [self.end], dtype=np.uint32)
            for start, end in zip(starts, ends, strict=True)
        ]

    def encode_chats(self, texts: Sequence[str]) -> list[tuple[Ids, Ints]]:
        self._tokenizer.encode_special_tokens = False
        try:
            encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        return [
            (np.array(one.ids, np.uint32), np.array([start for start, _ in one.offsets], np.int64))
            for one in encoded
        ]

    def decode(self, tokens: npt.NDArray[np.integer]) -> bytes:
        text: str = self._tokenizer.decode(tokens[tokens != self.end].tolist(), skip_special_tokens=False)
        return text.encode()


def tokenizer_file(path: Path) -> Path:
    """Return the `tokenizer.json` of a folder, or the file itself."""
    return path / TOKENIZER_FILE if path.is_dir() else path


def _parts(document: bytes) -> list[bytes]:
    """Cut a document into parts of at most about `PART_BYTES`, at the ends of lines if possible.

    The line break begins the next part: most tokenizers divide a text there anyway.
    """
    parts = []
    start = 0
    while len(document) - start > PART_BYTES:
        edge = document.rfind(b"\n", start + 1, start + PART_BYTES)
        if edge < 0:
            edge = boundary(document, start + PART_BYTES)
        parts.append(document[start:edge])
        start = edge
    return [*parts, document[start:]]


def _settings(file: Path) -> Mapping[str, Any]:
    if not file.exists():
        return {}
    try:
        settings = json.loads(file.read_bytes())
    except ValueError as error:
        raise _refusal(str(file), f"not JSON: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the template beside a tokenizer: a file of its own, or one of the settings."""
    file, source = folder / TEMPLATE_FILE, settings.get("chat_template")
    if file.is_file():
        source = read_text(file)
    if isinstance(source, list):  # several with names
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    variables = {name: _text(value) for name, value in settings.items() if name.endswith("_token")}
    return ChatTemplate(source, {name: text for name, text in variables.items() if text})


def _text(token: Any) -> str:
    """Return a special token's text; settings hold it directly or in a table."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _first(ids: Mapping[str, int], tokens: Sequence[str]) -> int | None:
    return next((ids[token] for token in tokens if token in ids), None)


def _refusal(where: str, problem: str) -> InputError:
    return InputError(Violation("task.tokenizer", f"{where}: {problem}"))
