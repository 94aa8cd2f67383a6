"""Conversations as tokens: which of them are targets, by our marks and by the library's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from weft.errors import InputError
from weft.training.data.chat_template import CHATML, ChatTemplate, MarkedText, TemplateError
from weft.training.data.chats import ChatCorpus, marked_tokens, open_chats, require_chats
from weft.training.data.conversations import Conversation
from weft.training.data.tokenizer_json import JsonTokenizer
from weft.training.data.tokenizers import ByteTokenizer, get_tokenizer
from weft.training.data.tokenizers import Tokenizer as AnyTokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
MARKED = CHATML.replace(
    "{{ message['content'] }}<|im_end|>\n",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}",
)
# As templates of models that reason do: earlier answers lose what the last one keeps.
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and loop.last %}A:<think></think>"
    "{% elif message['role'] == 'assistant' %}A:{% else %}Q:{% endif %}{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
MESSAGES = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant"]),
        st.text(max_size=12).filter(lambda text: "<|" not in text),
    ),
    min_size=2,
    max_size=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer and a template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["user assistant what is the sum of two and two? four\n" * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML})
    )
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> JsonTokenizer:
    return JsonTokenizer.read(folder)


def target_text(marked: MarkedText) -> list[str]:
    return [marked.text[start:end] for start, end in marked.spans]


@given(MESSAGES)
def test_targets_are_what_the_assistant_says_and_its_end(messages: list[dict[str, str]]) -> None:
    marked = ChatTemplate(CHATML, {}).render(Conversation(messages=tuple(messages)))
    said = [one["content"] + "<|im_end|>\n" for one in messages[1:] if one["role"] == "assistant"]
    assert target_text(marked) == said
    # A template that marks its answers itself gives the same, and the first message, too.
    itself = ChatTemplate(MARKED, {}).render(Conversation(messages=tuple(messages)))
    assert itself.text == marked.text
    assert target_text(itself)[-len(said) or len(itself.spans) :] == said


def test_only_the_completion_has_targets() -> None:
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    given = Conversation(messages=(question, answer, question, answer), first_answer=3)
    assert target_text(ChatTemplate(CHATML, {}).render(given)) == ["b<|im_end|>\n"]
    plain = Conversation(prompt="2+2=", completion="4")
    assert ChatTemplate(CHATML, {}).render(plain) == MarkedText("2+2=4", ((4, 5),))


def test_an_answer_that_the_template_rewrites_is_no_target() -> None:
    messages = tuple(
        {"role": role, "content": content}
        for role, content in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    )
    marked = ChatTemplate(FORGETFUL, {}).render(Conversation(messages=messages))
    assert marked.text == "Q:a\nA:b\nQ:c\nA:<think></think>d\n"
    assert target_text(marked) == ["<think></think>d\n"]


def test_a_template_gets_its_variables_and_fails_with_its_words() -> None:
    chat = Conversation(messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
    source = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(chat).text == "<s>ab"
    with pytest.raises(TemplateError, match="the chat template fails: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(chat)


@settings(max_examples=40)
@given(MESSAGES)
def test_tokens_and_marks_are_the_librarys(
    folder: Path, tokenizer: JsonTokenizer, messages: list[dict[str, str]]
) -> None:
    library = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    asked = library.apply_chat_template(
        messages, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    marked = ChatTemplate(MARKED, {}).render(Conversation(messages=tuple(messages)))
    ((ids, flags),) = marked_tokens([(marked, False)], tokenizer)
    assert ids.tolist() == asked["input_ids"]
    assert flags.astype(int).tolist() == asked["assistant_masks"]


@given(st.text(max_size=30), st.text(max_size=30))
def test_bytes_are_targets_by_the_characters_that_they_are_of(prompt: str, completion: str) -> None:
    marked = ChatTemplate(CHATML, {}).render(Conversation(prompt=prompt, completion=completion))
    ((ids, flags),) = marked_tokens([(marked, True)], ByteTokenizer())
    expected = prompt.encode("utf-8", "replace"), completion.encode("utf-8", "replace")
    assert bytes(ids.tolist()) == b"".join(expected) + b"\0"
    assert bytes(ids[flags].tolist()) == expected[1] + b"\0"


def corpus(folder: Path, rows: list[dict[str, Any]], sequence: int, tokenizer: AnyTokenizer) -> ChatCorpus:
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_chats(str(path), sequence, tokenizer, folder / "cache")


def test_samples_are_whole_conversations_filled_up_or_cut(tmp_path: Path) -> None:
    rows = [{"prompt": "q" * number, "completion": "a" * number} for number in range(1, 13)]
    found = corpus(tmp_path, rows, 12, get_tokenizer("bytes"))
    sides = (found.training, found.held_out)
    assert [len(side) for side in sides] == [11, 1]
    seen = {}
    for side in sides:
        tokens, asked = side.take(np.arange(len(side)))
        assert tokens.shape == asked.shape == (len(side), 13)
        assert (asked[:, 1:].sum(1) == side.counts).all()
        for row, flags in zip(tokens, asked, strict=True):
            text = bytes(row.tolist())
            number = text.count(b"q")
            seen[number] = bytes(row[flags].tolist())
            assert text == (b"q" * number + b"a" * number + b"\0" * 13)[:13]
    assert seen == {number: (b"a" * number + b"\0")[: 13 - number] for number in range(1, 13)}
    assert found.warnings == ("6 of 12 conversations do not end within 12 tokens and are cut",)
    assert 0 < found.training.filled < 1


def test_a_missing_template_is_told_where_a_row_has_messages(
    tmp_path: Path, tokenizer: JsonTokenizer
) -> None:
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows: list[dict[str, Any]] = [{"prompt": "q", "completion": "a"}] * 3
    told = ("bytes has no chat template; ChatML takes its place",)
    assert corpus(tmp_path, rows, 200, ByteTokenizer()).warnings == ()
    rows.append({"prompt": talk[:1], "completion": talk[1:]})
    # The second time, the cache has the answer.
    assert [corpus(tmp_path, rows, 200, ByteTokenizer()).warnings for _ in range(2)] == [told, told]
    assert corpus(tmp_path, rows, 200, tokenizer).warnings == ()


def test_conversations_without_an_answer_in_reach_are_left_out(
    tmp_path: Path, tokenizer: JsonTokenizer
) -> None:
    rows = [{"prompt": "q", "completion": "a"}] * 3 + [{"prompt": "q" * 99, "completion": "a"}]
    found = corpus(tmp_path, rows, 8, tokenizer)
    assert len(found.training) + len(found.held_out) == 3
    assert "1 of 4 conversations have no answer within 8 tokens and are left out" in found.warnings
    # Another sequence reads the same tokens.
    again = open_chats(str(tmp_path / "chats.jsonl"), 200, tokenizer, tmp_path / "cache")
    assert len(again.training) + len(again.held_out) == 4
    assert again.fingerprint == found.fingerprint
    assert len(list((tmp_path / "cache" / "chats").iterdir())) == 1


def test_templates_come_from_the_tokenizers_folder(tmp_path: Path, folder: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings_file = tmp_path / "tokenizer_config.json"
    assert get_tokenizer(str(tmp_path)).chat_template == ChatTemplate(CHATML, {"eos_token": "<|im_end|>"})
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    settings_file.write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": named}))
    assert get_tokenizer(str(tmp_path)).chat_template == ChatTemplate("y", {"eos_token": "<|im_end|>"})
    (tmp_path / "chat_template.jinja").write_text("z")
    template = get_tokenizer(str(tmp_path)).chat_template
    assert template is not None
    assert template.source == "z"
    (tmp_path / "chat_template.jinja").unlink()
    settings_file.unlink()
    assert get_tokenizer(str(tmp_path)).chat_template is None


def test_a_template_that_fails_is_found_before_any_row_is_encoded(tmp_path: Path, folder: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% bad")
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    require_chats(str(path), get_tokenizer(str(folder)))
    with pytest.raises(InputError, match=r"task\.data: row 1: the chat template fails: ") as refused:
        require_chats(str(path), get_tokenizer(str(tmp_path)))
    assert len(refused.value.violations) == 1
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template\.jinja"):
        get_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (
            [{"prompt": "q", "completion": "a"}],
            "1 conversations have an answer within 8 tokens; 2 are needed",
        ),
        ([{"messages": [{"role": "user", "content": "q"}]}] * 3, "0 conversations have an answer"),
        ([{"prompt": "q", "completion": "a"}, {"prompt": "q"}], "line 2: 'prompt' is no list of messages"),
    ],
)
def test_too_few_answers_and_bad_rows_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], line: str
) -> None:
    with pytest.raises(InputError, match=line):
        corpus(tmp_path, rows, 8, get_tokenizer("bytes"))
    assert not list((tmp_path / "cache").glob("chats/.*"))
