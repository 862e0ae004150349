"""What a document is, and where in its text the parts lie that `--loss_on completion` trains on."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from sparseforge_ds.model.chat_template import Span, render_chat, render_turns

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def tokenizable(text: str) -> str:
    """A text with U+FFFD in the place of each half of a surrogate pair, which no tokenizer takes."""
    return _LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


class PromptAndCompletion(str):
    """The text of a record with both, as strings."""

    prompt: int
    """Characters of the prompt."""

    def __new__(cls, prompt: str, completion: str) -> PromptAndCompletion:
        """Join them."""
        document = super().__new__(cls, prompt + completion)
        document.prompt = len(prompt)
        return document


@dataclass(frozen=True)
class Conversation:
    """A record that the tokenizer's chat template makes text of."""

    messages: tuple[dict[str, Any], ...]
    """Each with a role and content."""
    where: str
    """File and record, for errors."""
    prompt: int | None = None
    """How many of the messages are the prompt, of a record with prompt and completion."""

    def __len__(self) -> int:
        """About the characters."""
        return sum(len(str(message.get("content"))) for message in self.messages)

    def render(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The text, with the template's own special tokens.

        Raises:
            ValueError: there is no template, or it refuses the conversation.
        """
        return self._render(tokenizer, self.messages)

    def trained(self, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
        """The text, and what of it is the completion, or the assistant's turns of a record with messages alone.

        Raises:
            ValueError: as `render`; or the template does not say where these parts are.
        """
        text = self.render(tokenizer)
        if self.prompt is None:
            return text, self._turns(tokenizer, text)
        prompt = self._render(tokenizer, self.messages[: self.prompt], add_generation_prompt=True)
        if not text.startswith(prompt):
            raise ValueError(
                f"{self.where}: the chat template of {tokenizer.name_or_path} renders the prompt otherwise when its "
                "completion follows, so that --loss_on completion cannot tell them apart; give prompt and completion "
                "as strings"
            )
        return text, [(len(prompt), len(text))]

    def _turns(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[Span]:
        if not _GENERATION.search(tokenizer.get_chat_template()):
            raise ValueError(
                f"{self.where}: the chat template of {tokenizer.name_or_path} does not mark the assistant's turns, "
                "which --loss_on completion trains on; put them between {% generation %} and {% endgeneration %} in "
                "the template (chat_template.jinja), or give records with prompt and completion"
            )
        with self._named():
            texts, spans = render_turns(tokenizer, self.messages)
        if texts != [text]:
            raise ValueError(
                f"{self.where}: the chat template of {tokenizer.name_or_path} makes another text of the conversation "
                "each time (does it print the time?), so that --loss_on completion cannot tell its turns apart; put a "
                "constant in the place of that (chat_template.jinja), or give records with prompt and completion"
            )
        return spans

    def _render(self, tokenizer: PreTrainedTokenizerBase, messages: tuple[dict[str, Any], ...], **how: bool) -> str:
        if not tokenizer.chat_template:
            raise ValueError(
                f"{self.where}: is a conversation, and the tokenizer has no chat template; put one into the "
                "model's folder (chat_template.jinja), or name a field with text by --text_field"
            )
        if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
            raise ValueError(
                f"{self.where}: is a conversation, and of the tokenizer's chat templates "
                f"({', '.join(tokenizer.chat_template)}) none is the default; put one into the model's folder "
                "(chat_template.jinja)"
            )
        with self._named():
            return render_chat(tokenizer, messages, **how)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Add to an error of the template the record, and a cure."""
        try:
            yield
        except ValueError as error:
            raise ValueError(
                f"{self.where}: {error}; repair or remove it, or repair the template (chat_template.jinja)"
            ) from None


Document = str | Conversation


def is_blank(document: Document) -> bool:
    """Whether it has no text."""
    contents = [document] if isinstance(document, str) else [message.get("content") for message in document.messages]
    return not any(str(content or "").strip() for content in contents)


def trained_spans(document: Document, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """The text of a document that is no plain text, and what of it `--loss_on completion` trains on.

    Raises:
        ValueError: there is no telling.
    """
    if isinstance(document, Conversation):
        return document.trained(tokenizer)
    assert isinstance(document, PromptAndCompletion)
    return document, [(document.prompt, len(document))]
