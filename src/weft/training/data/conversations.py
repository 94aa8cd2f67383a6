"""Conversations: rows of a table as messages with roles, or as a prompt and its completion.

Columns of the first row decide for the table. The first that exists counts.

    messages, or a named column   messages with `role` and `content`; `tools` beside them, or their JSON text
    conversations                 such messages, or ShareGPT's with `from` and `value`
    prompt, completion            two texts, or two lists of messages
    instruction, (input), output  Alpaca's question and answer
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.describe.one_line import one_line
from weft.errors import InputError, Violation

ASSISTANT = "assistant"
_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT}
_ALLOWED = "messages; conversations; prompt and completion; instruction and output"

Row = Mapping[str, Any]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages that a template renders, or, without messages, a prompt and its completion as they are.

    `first_answer` is the first message whose content an assistant may learn to say.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    first_answer: int = 0
    prompt: str = ""
    completion: str = ""

    def __repr__(self) -> str:
        kind = f"{len(self.messages)} messages" if self.messages else "a prompt and its completion"
        return one_line(self, kind)


Reader = Callable[[Row], Conversation]


@dataclass(frozen=True)
class Conversations:
    """The conversations of a table's rows.

    Attributes:
        rows: yields the name of every row, for errors, and the row.
        key: a JSON value that changes when a row does.
    """

    rows: Callable[[], Iterator[tuple[str, Row]]]
    key: object
    column: str

    def __iter__(self) -> Iterator[Conversation]:
        reader: Reader | None = None
        for name, row in self.rows():
            try:
                reader = reader or reader_of(row, self.column)
                yield reader(row)
            except _RowError as error:
                raise InputError(Violation("task.data", f"{name}: {error}")) from None

    def require(self) -> None:
        """Read the first row.

        Raises:
            InputError: if there is none, or it is no conversation.
        """
        if next(iter(self), None) is None:
            raise InputError(Violation("task.data", "the table has no rows"))


def reader_of(row: Row, column: str) -> Reader:
    """Return the reader of a table whose first row is `row`; `column` names messages, if not empty."""
    if column:
        if column not in row:
            raise _RowError(f"no column {column!r}; columns: {', '.join(row) or 'none'}")
        return lambda row: _of_messages(row, column)
    if "messages" in row:
        return lambda row: _of_messages(row, "messages")
    if "conversations" in row:
        return lambda row: _of_messages(row, "conversations")
    if "prompt" in row and "completion" in row:
        return _of_prompt
    if "instruction" in row and "output" in row:
        return _of_instruction
    raise _RowError(f"no conversation; allowed columns: {_ALLOWED}; found: {', '.join(row) or 'none'}")


class _RowError(Exception):
    """Why a row is no conversation."""


def _of_messages(row: Row, column: str) -> Conversation:
    return Conversation(messages=_messages(row.get(column), column), tools=_tools(row))


def _of_prompt(row: Row) -> Conversation:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation(prompt=prompt, completion=completion)
    asked = _messages(prompt, "prompt")
    messages = (*asked, *_messages(completion, "completion"))
    return Conversation(messages=messages, tools=_tools(row), first_answer=len(asked))


def _of_instruction(row: Row) -> Conversation:
    parts = [row.get("instruction"), row.get("input") or ""]
    if not all(isinstance(part, str) for part in (*parts, row.get("output"))):
        raise _RowError("instruction, input and output are texts")
    question = "\n\n".join(str(part) for part in parts if part)
    messages = ({"role": "user", "content": question}, {"role": ASSISTANT, "content": row["output"]})
    return Conversation(messages=messages)


def _tools(row: Row) -> tuple[Any, ...]:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except (ValueError, RecursionError) as error:
            raise _RowError(f"'tools' is a text that is not JSON: {error}") from None
    tools = [] if tools is None else tools
    if not isinstance(tools, list) or not all(isinstance(one, Mapping) for one in tools):
        raise _RowError("'tools' is no list of objects")
    return tuple(tools)


def _messages(value: Any, column: str) -> tuple[Message, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise _RowError(f"{column!r} is no list of messages")
    return tuple(_message(one, column) for one in value)


def _message(value: Any, column: str) -> Message:
    if not isinstance(value, Mapping):
        raise _RowError(f"{column!r} holds a message that is no object")
    # Null stands for a missing key, as in tables of parquet.
    message = {key: one for key, one in value.items() if one is not None}
    if "from" in message:
        role = message.pop("from")
        role = _ROLES.get(role, role) if isinstance(role, str) else role
        message = {"role": role, "content": message.pop("value", ""), **message}
    if not isinstance(message.get("role"), str):
        raise _RowError(f"{column!r} holds a message without a role")
    return message
