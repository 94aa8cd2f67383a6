"""Tokenizers of the `tokenizers` library: what they read, how documents end, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from weft.describe.run_file import load_run, parse_run
from weft.errors import InputError
from weft.training.data import tokenizer_json
from weft.training.data.text import Corpus, open_corpus
from weft.training.data.tokenizer_json import JsonTokenizer
from weft.training.data.tokenizers import get_tokenizer, tokenizer_name
from weft.training.interchange.export import tokenizer_files
from weft.training.tasks import make_task
from weft.training.tasks.base import TaskSettings

END = "<|endoftext|>"
TEXT = "the weft goes under and over the warp\n" * 40 + "naïve ☃ \N{SNOWMAN}\n"


def trained(special: list[str], vocabulary: int = 300) -> Tokenizer:
    """Byte-level BPE; every byte is in its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    trained([END]).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> JsonTokenizer:
    return JsonTokenizer.read(folder)


@given(st.lists(st.text(max_size=40), min_size=1, max_size=5))
def test_documents_come_back_and_each_ends_once(tokenizer: JsonTokenizer, documents: list[str]) -> None:
    contents = [document.encode() for document in documents]
    end = trained([END]).token_to_id(END)
    for content, tokens in zip(contents, tokenizer.encode(contents), strict=True):
        assert np.flatnonzero(tokens == end).tolist() == [len(tokens) - 1]
        assert tokenizer.decode(tokens) == content
        assert tokens.max() < tokenizer.vocabulary


def test_ids_are_the_librarys_and_a_document_cannot_end_itself(tokenizer: JsonTokenizer) -> None:
    plain = trained([END])
    (tokens,) = tokenizer.encode([TEXT.encode()])
    assert tokens.tolist() == [*plain.encode(TEXT).ids, plain.token_to_id(END)]
    assert len(tokens) < len(TEXT) / 2
    (forged,) = tokenizer.encode([f"a{END}b".encode()])
    assert tokenizer.decode(forged) == f"a{END}b".encode()
    assert (forged == plain.token_to_id(END)).sum() == 1


def test_a_long_document_is_encoded_in_parts_that_end_before_a_line_does(
    tokenizer: JsonTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tokenizer.encode([TEXT.encode(), b"short"])
    monkeypatch.setattr(tokenizer_json, "PART_BYTES", 100)
    in_parts = tokenizer.encode([TEXT.encode(), b"short"])
    assert [tokens.tolist() for tokens in in_parts] == [tokens.tolist() for tokens in whole]
    snow = "\N{SNOWMAN}" * 99
    assert tokenizer.decode(tokenizer.encode([snow.encode()])[0]) == snow.encode()


def test_settings_that_pad_and_cut_texts_do_not_count(tmp_path: Path, tokenizer: JsonTokenizer) -> None:
    cutting = trained([END])
    cutting.enable_truncation(4)
    cutting.enable_padding(length=4)
    cutting.save(str(tmp_path / "tokenizer.json"))
    (tokens,) = get_tokenizer(str(tmp_path)).encode([TEXT.encode()])
    assert tokens.tolist() == tokenizer.encode([TEXT.encode()])[0].tolist()


def test_the_settings_beside_it_name_the_token_that_ends_a_document(tmp_path: Path) -> None:
    plain = trained(["<stop>", "[MASK]", END])
    plain.save(str(tmp_path / "tokenizer.json"))
    for token in ("<stop>", {"content": "<stop>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        named = JsonTokenizer.read(tmp_path / "tokenizer.json")
        assert named.encode([b""])[0].tolist() == [plain.token_to_id("<stop>")]
    assert named.mask == plain.token_to_id("[MASK]")
    (tmp_path / "tokenizer_config.json").unlink()
    unnamed = JsonTokenizer.read(tmp_path)
    assert unnamed.encode([b""])[0].tolist() == [plain.token_to_id(END)]
    assert unnamed.key != named.key


def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    for content, problem in (
        (b"{", "not a tokenizer"),
        (b'{"version": "1.0"}', "not a tokenizer"),
        (trained([]).to_str().encode(), "no token ends a document: name one as eos_token in tokenizer_con"),
    ):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(InputError, match=problem) as refused:
            get_tokenizer(str(tmp_path))
        assert len(refused.value.violations) == 1
        assert "\n" not in str(refused.value)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot be read: No such file"):
        get_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match=r"'byte' does not exist.*nearest valid: bytes"):
        get_tokenizer("byte")


def test_broken_settings_are_refused(tmp_path: Path) -> None:
    trained([END]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config\.json: not JSON"):
        get_tokenizer(str(tmp_path))


def corpus_of(text: Path, tokenizer: str) -> Corpus:
    return open_corpus(str(text), 8, get_tokenizer(tokenizer), text.parent / "cache")


def test_tokens_are_cached_by_the_content_of_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    first = corpus_of(text, str(folder))
    copy = tmp_path / "copy.json"
    copy.write_bytes((folder / "tokenizer.json").read_bytes())
    assert corpus_of(text, str(copy)).fingerprint == first.fingerprint
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1
    trained([END], vocabulary=280).save(str(copy))
    assert corpus_of(text, str(copy)).fingerprint != first.fingerprint


def test_tokenizers_hold_out_the_same_text(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 9)
    names = ("bytes", str(folder))
    corpora = [corpus_of(text, name) for name in names]
    decoded = [
        get_tokenizer(name).decode(corpus.held_out.tokens)
        for name, corpus in zip(names, corpora, strict=True)
    ]
    assert decoded[0] == decoded[1]
    assert corpora[1].held_out_bytes_per_token > 2 > corpora[0].held_out_bytes_per_token


def test_bytes_that_are_no_text_are_repaired_and_counted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(TEXT.encode() + b"\xff" * (number % 2))
    corpus = corpus_of(tmp_path / "texts", str(folder))
    assert corpus.repaired == (2, str(tmp_path / "texts" / "1.txt"))
    assert corpus_of(tmp_path / "texts", "bytes").repaired == (0, "")
    task = make_task("causal-lm", settings_of(tmp_path / "texts", str(folder)))
    assert task.about["warning"] == (  # type: ignore[attr-defined]
        f"2 documents, the first {tmp_path}/texts/1.txt: bytes that are not UTF-8 are read as U+FFFD"
    )


def settings_of(text: Path, tokenizer: str, vocabulary: int = 300) -> TaskSettings:
    return TaskSettings(
        data=str(text), sequence=8, vocabulary=vocabulary, cache=text.parent / "cache", tokenizer=tokenizer
    )


@pytest.mark.parametrize(("kind", "masks"), [("causal-lm", 0), ("masked-lm", 1)])
def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(
    folder: Path, tokenizer: JsonTokenizer, tmp_path: Path, kind: str, masks: int
) -> None:
    needed = tokenizer.vocabulary + masks
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    assert make_task(kind, settings_of(text, str(folder), needed)).samples
    with pytest.raises(InputError, match=rf"{needed - 1} is too small; allowed: at least {needed}.*token"):
        make_task(kind, settings_of(text, str(folder), needed - 1))


def test_a_mask_of_the_tokenizers_own_masks(tmp_path: Path) -> None:
    plain = trained([END, "[MASK]"])
    plain.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(TEXT)
    task = make_task("masked-lm", settings_of(tmp_path / "text.txt", str(tmp_path)))
    inputs, _ = task.batch(np.arange(task.samples))
    assert (inputs == plain.token_to_id("[MASK]")).any()
    assert inputs.max() < 300


def test_a_run_file_names_bytes_a_file_beside_it_or_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    file = tmp_path / "run.toml"
    for model, key, name in (
        ('hf = "llama"', "", "bytes"),
        ('hf = "llama"', 'tokenizer = "model"', str(tmp_path / "llama")),
        ('hf = "llama/config.json"', 'tokenizer = "model"', str(tmp_path / "llama")),
        ('preset = "gpt-1m"', 'tokenizer = "tokenizer.json"', str(tmp_path / "tokenizer.json")),
    ):
        file.write_text(f"[model]\n{model}\n[task]\n{key}\n")
        assert tokenizer_name(load_run(file)) == name
    with pytest.raises(InputError, match=r"task\.tokenizer: 'model' needs model\.hf.*nearest valid: bytes"):
        parse_run({"model": {"preset": "gpt-1m"}, "task": {"tokenizer": "model"}})


def test_tables_beside_a_run_file_are_found_with_split_and_column(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    file = tmp_path / "run.toml"
    for data, found in (
        ("rows.jsonl#body", f"{tmp_path}/rows.jsonl#body"),
        ("hf:rows.jsonl@train[:10%]#body", f"hf:{tmp_path}/rows.jsonl@train[:10%]#body"),
        ("hf:someone/rows:config@train", "hf:someone/rows:config@train"),
        ("python-stdlib", "python-stdlib"),
    ):
        file.write_text(f'[model]\npreset = "gpt-1m"\n[task]\ndata = "{data}"\n')
        assert load_run(file).task.data == found


@pytest.mark.parametrize("described", [False, True])
def test_exported_files_give_the_ids_of_the_run(tmp_path: Path, described: bool) -> None:
    plain = trained(["<stop>", END])
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    plain.save(str(tmp_path / "from" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<stop>"}
    if described:
        (tmp_path / "from" / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in tokenizer_files(str(tmp_path / "from"), 16).items():
        (tmp_path / "to" / name).write_text(text)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "to", local_files_only=True)
    (tokens,) = get_tokenizer(str(tmp_path / "from")).encode([TEXT.encode()])
    assert loaded(TEXT)["input_ids"] == tokens[:-1].tolist()
    assert loaded.eos_token_id == tokens[-1] == plain.token_to_id("<stop>" if described else END)
