"""Rows of tables as conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.errors import InputError
from weft.training.data.conversations import Conversation
from weft.training.data.sources import open_conversations

QUESTION, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CHAT = Conversation(messages=(QUESTION, ANSWER))


# Arrow gives every object of a column the keys of all of them.
CALLS: list[dict[str, Any]] = [
    {
        "messages": [QUESTION, {**ANSWER, "tool_calls": [{"name": name, "arguments": {key: "x"}}]}],
        "tools": [{"name": name, "parameters": {"properties": {key: {"type": "string"}}}}],
    }
    for name, key in (("weather", "city"), ("price", "stock"))
]


def table(folder: Path, *rows: dict[str, Any], name: str = "chats.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "read"),
    [
        ({"messages": [QUESTION, ANSWER], "id": 3}, CHAT),
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, CHAT),
        ({"conversations": [QUESTION, ANSWER]}, CHAT),
        ({"prompt": "2+2=", "completion": "4"}, Conversation(prompt="2+2=", completion="4")),
        (
            {"prompt": [QUESTION], "completion": [ANSWER]},
            Conversation(messages=(QUESTION, ANSWER), first_answer=1),
        ),
        ({"instruction": "2+2?", "input": "", "output": "4"}, CHAT),
        (
            {"instruction": "add", "input": "2 and 2", "output": "4"},
            Conversation(messages=({"role": "user", "content": "add\n\n2 and 2"}, ANSWER)),
        ),
        (
            {"messages": [QUESTION], "tools": [{"name": "sum"}]},
            Conversation(messages=(QUESTION,), tools=({"name": "sum"},)),
        ),
        (
            {"messages": [QUESTION], "tools": '[{"name": "sum"}]'},
            Conversation(messages=(QUESTION,), tools=({"name": "sum"},)),
        ),
        ({"messages": [QUESTION, ANSWER], "tools": ""}, CHAT),
        ({"messages": [QUESTION, ANSWER], "tools": None}, CHAT),
    ],
)
def test_every_known_form_of_a_row_is_read(tmp_path: Path, row: dict[str, Any], read: Conversation) -> None:
    assert list(open_conversations(table(tmp_path, row, row))) == [read, read]


def test_a_column_can_be_named_and_parquet_holds_the_same(tmp_path: Path) -> None:
    row = {"messages": [ANSWER], "talk": [QUESTION, ANSWER]}
    path = table(tmp_path, row)
    assert list(open_conversations(f"{path}#talk")) == [CHAT]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "chats.parquet")
    assert list(open_conversations(str(tmp_path / "chats.parquet#talk"))) == [CHAT]
    # Parquet fills in the keys that a message lacks; a template would see them.
    mixed = {"messages": [{**QUESTION, "name": "ada"}, ANSWER]}
    pq.write_table(pa.Table.from_pylist([mixed]), tmp_path / "named.parquet")
    (chat,) = open_conversations(str(tmp_path / "named.parquet"))
    assert list(chat.messages) == mixed["messages"]


def test_tool_calls_of_parquet_and_of_json_are_the_same(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(CALLS), tmp_path / "calls.parquet")
    read = list(open_conversations(str(tmp_path / "calls.parquet")))
    assert read == list(open_conversations(table(tmp_path, *CALLS)))
    assert [list(chat.messages) for chat in read] == [row["messages"] for row in CALLS]


def test_nulls_inside_the_objects_of_json_are_kept(tmp_path: Path) -> None:
    tool = {"name": "sum", "parameters": {"default": None}}
    (chat,) = open_conversations(table(tmp_path, {"messages": [QUESTION], "tools": [tool]}))
    assert chat.tools == (tool,)


def test_the_datasets_library_reads_the_same(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"messages": [QUESTION, ANSWER]}] * 3).save_to_disk(str(tmp_path / "saved"))
    assert list(open_conversations(f"hf:{tmp_path / 'saved'}@")) == [CHAT] * 3
    datasets.Dataset.from_list(CALLS).save_to_disk(str(tmp_path / "calls"))
    calls = open_conversations(f"hf:{tmp_path / 'calls'}@")
    assert list(calls) == list(open_conversations(table(tmp_path, *CALLS)))


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([{"text": "a"}], "line 1: no conversation; allowed columns: messages; .*; found: text"),
        ([{"messages": "a"}], "line 1: 'messages' is no list of messages"),
        ([{"messages": []}], "line 1: 'messages' is no list of messages"),
        ([{"messages": ["a"]}], "line 1: 'messages' holds a message that is no object"),
        ([{"messages": [{"content": "a"}]}], "line 1: 'messages' holds a message without a role"),
        ([{"messages": [{"role": ["user"]}]}], "line 1: 'messages' holds a message without a role"),
        ([{"conversations": [{"from": ["human"]}]}], "'conversations' holds a message without a role"),
        ([{"messages": [QUESTION], "tools": 5}], "line 1: 'tools' is no list of objects"),
        ([{"messages": [QUESTION], "tools": {"name": "sum"}}], "line 1: 'tools' is no list of objects"),
        ([{"messages": [QUESTION], "tools": ["sum"]}], "line 1: 'tools' is no list of objects"),
        ([{"messages": [QUESTION], "tools": '"sum"'}], "line 1: 'tools' is no list of objects"),
        ([{"messages": [QUESTION], "tools": "sum"}], "line 1: 'tools' is a text that is not JSON: Expecting"),
        ([{"prompt": "a", "completion": None}], "line 1: 'prompt' is no list of messages"),
        ([{"instruction": "a", "output": 4}], "line 1: instruction, input and output are texts"),
        ([], "holds no text"),
    ],
)
def test_other_rows_are_refused_with_one_line(tmp_path: Path, rows: list[dict[str, Any]], line: str) -> None:
    with pytest.raises(InputError, match=line) as refused:
        open_conversations(table(tmp_path, *rows))
    assert len(refused.value.violations) == 1


def test_a_bad_row_later_on_and_a_missing_column_are_named(tmp_path: Path) -> None:
    path = table(tmp_path, {"messages": [QUESTION]}, {"text": "a"})
    with pytest.raises(InputError, match=r"chats.jsonl: line 2: 'messages' is no list of messages"):
        list(open_conversations(path))
    with pytest.raises(InputError, match="line 1: no column 'talk'; columns: messages"):
        open_conversations(f"{path}#talk")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match=r"a\.txt is no table; tables are \.jsonl and \.ndjson"):
        open_conversations(str(tmp_path))
