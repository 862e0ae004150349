"""Documents of a text, and the spans of their text that `--loss_on completion` trains on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from sparseforge_ds.data.token_documents import TokenDocument
from sparseforge_ds.model.chat_template import TextSpan, render_chat, render_turns

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def tokenizable(text: str) -> str:
    """Replace each unpaired half of a surrogate pair, which no tokenizer takes, by U+FFFD."""
    return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


class PromptAndCompletion(str):
    """Text of a record whose prompt and completion are strings, joined."""

    prompt: int
    """Characters of the prompt."""

    def __new__(cls, prompt: str, completion: str) -> PromptAndCompletion:
        """Join prompt and completion."""
        document = super().__new__(cls, prompt + completion)
        document.prompt = len(prompt)
        return document


@dataclass(frozen=True)
class Conversation:
    """Record that the tokenizer's chat template turns into text."""

    messages: tuple[dict[str, Any], ...]
    """Messages, each with `role`, and `content` or `tool_calls`; the template also gets what else they have."""
    where: str
    """File and record, for error messages."""
    prompt: int | None = None
    """Number of leading messages that are the prompt; None for a record without prompt and completion."""
    tools: tuple[dict[str, Any], ...] | None = None
    """JSON schemas of functions that the assistant may call; None for none."""

    def __len__(self) -> int:
        """Return the characters of all messages and tools, without those of the template."""
        values = [value for message in self.messages for key, value in message.items() if key != "role"]
        return sum(len(str(value)) for value in (*values, *(self.tools or ())))

    def render(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the text, with the special tokens of the template.

        Raises:
            ValueError: there is no template, or it refuses the conversation.
        """
        return self._render(tokenizer, self.messages)

    def render_with_spans(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[TextSpan]]:
        """Return the text and its trained spans: the completion, or all turns of the assistant without one.

        Raises:
            ValueError: as `render`; or the template does not say where the spans are.
        """
        text = self.render(tokenizer)
        if self.prompt is None:
            return text, self._assistant_spans(tokenizer, text)
        if self.prompt == len(self.messages):  # no completion
            return text, []
        # Without a prompt, all of it is the completion; templates refuse to render no message.
        messages = self.messages[: self.prompt]
        prompt = self._render(tokenizer, messages, add_generation_prompt=True) if messages else ""
        if not text.startswith(prompt):
            raise ValueError(
                f"{self.where}: the chat template of {tokenizer.name_or_path} renders the prompt differently when its "
                "completion follows, so --loss_on completion cannot tell them apart; give prompt and completion as "
                "strings"
            )
        return text, [(len(prompt), len(text))]

    def _assistant_spans(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[TextSpan]:
        if not _GENERATION.search(tokenizer.get_chat_template(tools=self.tools and list(self.tools))):
            raise ValueError(
                f"{self.where}: the chat template of {tokenizer.name_or_path} does not mark the assistant's turns, "
                "which --loss_on completion trains on; put them between {% generation %} and {% endgeneration %} in "
                "the template (chat_template.jinja), or give records with prompt and completion"
            )
        with self._name_record_on_error():
            texts, spans = render_turns(tokenizer, self.messages, self.tools)
        if texts != [text]:
            raise ValueError(
                f"{self.where}: the chat template of {tokenizer.name_or_path} renders another text each time (does it "
                "choose at random?), so --loss_on completion cannot find the assistant's turns; put a constant in its "
                "place (chat_template.jinja), or give records with prompt and completion"
            )
        return spans

    def _render(self, tokenizer: PreTrainedTokenizerBase, messages: tuple[dict[str, Any], ...], **options: bool) -> str:
        if not tokenizer.chat_template:
            raise ValueError(
                f"{self.where}: is a conversation, and the tokenizer has no chat template; put one into the "
                "model's folder (chat_template.jinja), or name a field with text by --text_field"
            )
        if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
            raise ValueError(
                f"{self.where}: is a conversation, and none of the tokenizer's chat templates "
                f"({', '.join(tokenizer.chat_template)}) is the default; put one into the model's folder "
                "(chat_template.jinja)"
            )
        with self._name_record_on_error():
            return render_chat(tokenizer, messages, self.tools, **options)

    @contextlib.contextmanager
    def _name_record_on_error(self) -> Iterator[None]:
        """Add the record and a cure to an error of the template."""
        try:
            yield
        except ValueError as error:
            raise ValueError(
                f"{self.where}: {error}; repair or remove it, or repair the template (chat_template.jinja)"
            ) from None


Text = str | Conversation
Document = Text | TokenDocument


def is_blank(document: Document) -> bool:
    """Return True if the document has no text."""
    if isinstance(document, TokenDocument):
        return len(document) == 0
    contents = [document] if isinstance(document, str) else [message.get("content") for message in document.messages]
    return not any(str(content or "").strip() for content in contents)


def text_with_spans(document: Text, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[TextSpan]]:
    """Return the text of a document that is not plain text, and the spans that `--loss_on completion` trains on.

    Raises:
        ValueError: the spans cannot be found.
    """
    if isinstance(document, Conversation):
        return document.render_with_spans(tokenizer)
    assert isinstance(document, PromptAndCompletion)
    return document, [(document.prompt, len(document))]
