"""Tokens that a prune reads: the first ones of a text, of which no more is tokenized than is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.data.tokenization import tokenize
from sparseforge_ds.prune import sequences
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer
from tests.tiny_models import tiny_llama


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_long_text_is_tokenized_as_far_as_it_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a fox " * 50_000
    path = tmp_path / f"text.{kind}"
    path.write_text(text if kind == "txt" else json.dumps({"text": "short"}) + "\n" + json.dumps({"text": text}) + "\n")
    tokenized_characters: list[int] = []

    def watched(documents: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        tokenized_characters.append(sum(map(len, documents)))
        return tokenize(documents, tokenizer)

    monkeypatch.setattr(sequences, "tokenize", watched)
    config = tiny_llama(vocab_size=BYTE_VOCABULARY).config
    token_NS = sequences.read_sequences(byte_tokenizer(), config, str(path), 400, 32)
    documents = [text] if kind == "txt" else ["short", text]
    expected_ids = [token for ids in tokenize(documents, byte_tokenizer()) for token in ids]
    assert token_NS.flatten().tolist() == expected_ids[:384]
    assert sum(tokenized_characters) < 0.05 * len(text)
