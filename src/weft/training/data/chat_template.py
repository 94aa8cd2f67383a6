"""Chat templates: the text of a conversation, and the parts of it that an assistant says.

The templates are those of `transformers`, rendered by it: in Jinja, from the tokenizer's folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.describe.one_line import one_line
from weft.training.data.conversations import ASSISTANT, Conversation

# For tokenizers without a template: ChatML, in its usual words.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text, and the ranges of its characters that are targets, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]

    __repr__ = one_line


class TemplateError(Exception):
    """Why a template does not render a conversation."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template and the variables for it, such as `eos_token`."""

    source: str
    variables: Mapping[str, str]

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.source)} characters")

    def render(self, conversation: Conversation) -> MarkedText:
        """Return the text of a conversation with the assistant's messages as targets.

        A template with `{% generation %}` marks them itself. With any other, an answer is what follows the
        text of the messages before it. A template may rewrite earlier answers, such as by leaving out their
        reasoning. An answer that the whole text does not repeat is no target, except for the last one.

        Raises:
            TemplateError: if the template fails.
        """
        messages = conversation.messages
        if not messages:
            text = conversation.prompt + conversation.completion
            return MarkedText(text, ((len(conversation.prompt), len(text)),))
        if _GENERATION.search(self.source):
            return self._marked_by_itself(conversation)
        text = self._text(conversation, len(messages))
        spans = []
        # Many templates fail without any message before the answer.
        for place in range(max(1, conversation.first_answer), len(messages)):
            if messages[place]["role"] != ASSISTANT:
                continue
            before = self._text(conversation, place, answer_follows=True)
            after = text if place == len(messages) - 1 else self._text(conversation, place + 1)
            if after.startswith(before) and text.startswith(after):
                spans.append((len(before), len(after)))
        return MarkedText(text, tuple(spans))

    def _marked_by_itself(self, conversation: Conversation) -> MarkedText:
        texts, marked = self._rendered(conversation, len(conversation.messages), marked=True)
        return MarkedText(texts[0], tuple((start, end) for start, end in marked[0]))

    def _text(self, conversation: Conversation, messages: int, *, answer_follows: bool = False) -> str:
        texts, _ = self._rendered(conversation, messages, add_generation_prompt=answer_follows)
        return texts[0]

    def _rendered(
        self,
        conversation: Conversation,
        messages: int,
        *,
        marked: bool = False,
        add_generation_prompt: bool = False,
    ) -> tuple[list[str], list[Any]]:
        # Not at the top: the import takes part of a second.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            render: Callable[..., Any] = render_jinja_template  # its annotation names the text alone
            texts, marks = render(
                conversations=[list(conversation.messages[:messages])],
                tools=list(conversation.tools) or None,
                chat_template=self.source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
            return texts, marks
        # Templates raise errors of Jinja and any of Python's.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TemplateError(f"the chat template fails: {reason}") from error
