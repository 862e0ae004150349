"""Text that a run is scored on: found, cut into windows, and refused by the names of its own flags."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.data.held_out import HeldOut, find_held_out, read_held_out
from sparseforge_ds.data.tokenization import tokenize
from sparseforge_ds.data.windows import trained_flags
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer, write_text


def arguments(**flags: Any) -> RunArguments:
    return RunArguments(deepspeed="zero3", seq_length=32, **flags)


def read(vocabulary: int = BYTE_VOCABULARY, **flags: Any) -> HeldOut:
    parsed = arguments(**flags)
    source = find_held_out(parsed)
    assert source is not None
    return read_held_out(source, byte_tokenizer(), vocabulary, parsed)


def test_held_out_text_is_the_first_windows_in_order(tmp_path):
    path = write_text(tmp_path / "text.jsonl", documents=20)
    texts = [f"Document {i} counts {i * i} things, and then it goes on about the number {i % 7}." for i in range(20)]
    ids = np.concatenate(tokenize(texts, byte_tokenizer()))
    all_windows = read(eval_dataset=str(path), eval_sequences=0)
    assert np.array_equal(all_windows.token_NS.reshape(-1), ids[: len(ids) // 32 * 32])
    three_windows = read(eval_dataset=str(path), eval_sequences=3)
    assert np.array_equal(three_windows.token_NS, all_windows.token_NS[:3]) and three_windows.key != all_windows.key
    assert find_held_out(arguments()) is None


def test_the_embedded_text_has_a_held_out_part():
    assert read(eval_dataset="stdlib:heldout", eval_sequences=5).token_NS.shape == (5, 32)


def test_completions_alone_are_scored_on_request(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "one and one is ", "completion": "two"}\n' * 9)
    held_out = read(eval_dataset=str(path), loss_on="completion")
    assert 0 < trained_flags(held_out.token_NS).sum() < held_out.token_NS.size / 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"eval_dataset": "nowhere.jsonl"}, "--eval_dataset nowhere.jsonl: no such file .*, or stdlib:heldout$"),
        ({"eval_dataset": "nowhere.jsonl=0.5"}, "nowhere.jsonl=0.5: no such file .*, or stdlib:heldout$"),
        ({"text_field": "body"}, "no field 'body'"),
        ({"eval_split": "test"}, "--eval_split test: --eval_dataset .*/text.jsonl is no folder or hub id, .* leave it"),
        (
            {"eval_split": "test", "eval_dataset": "stdlib:heldout"},
            "--eval_split test: --eval_dataset stdlib:heldout is no folder or hub id",
        ),
        ({"vocabulary": 100}, "the tokenizer gives token 256"),
    ],
)
def test_unusable_held_out_text_is_refused(tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        read(**{"eval_dataset": str(write_text(tmp_path / "text.jsonl", documents=3)), **flags})


def test_a_folder_without_the_split_and_a_short_text_are_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    write_text(tmp_path / "folder" / "train.jsonl")
    with pytest.raises(ValueError, match="--eval_dataset .*has no split validation .*--eval_split"):
        read(eval_dataset=str(tmp_path / "folder"))
    (tmp_path / "short.txt").write_text("short")
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(2**24 + 1)
    with pytest.raises(ValueError, match=r"large.txt: is one document of more than 16,777,216 bytes.*--sample_by"):
        find_held_out(arguments(eval_dataset=str(tmp_path / "large.txt")))
    with pytest.raises(ValueError, match=r"--eval_dataset .*short.txt: has 6 tokens, less than one window"):
        read(eval_dataset=str(tmp_path / "short.txt"))
