"""Small inputs of a run: a Hugging Face folder with a byte tokenizer, a text, and a DeepSpeed JSON."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny_models import tiny_llama

BYTE_VOCABULARY = 264
"""The vocabulary that a model needs for `byte_tokenizer`: 256 bytes, BOS, EOS, and some that no text uses."""


def byte_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte; <s> is 256 and </s> is 257."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    special = {"bos_token": "<s>"} if bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **special)


def write_model(folder: Path, model: PreTrainedModel | None = None) -> Path:
    """Write a model folder that the trainer accepts; by default `tiny_llama` with the byte vocabulary."""
    model = model or tiny_llama(vocab_size=BYTE_VOCABULARY, bos_token_id=256, eos_token_id=257, pad_token_id=None)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_text(path: Path, documents: int = 40) -> Path:
    """Write a .jsonl of different documents, about 80 bytes each."""
    lines = [
        f"Document {i} counts {i * i} things, and then it goes on about the number {i % 7}." for i in range(documents)
    ]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def deepspeed_json(stage: int = 3, batch: int = 4, **sparseforge: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration like the shipped ones, for a run of a few steps."""
    block = {"max_steps": 8, "method": {"update_every": 1, "hardening": [0.25, 0.75]}, **sparseforge}
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "sparseforge": block,
    }


def write_json(path: Path, content: Any) -> Path:
    """Write a JSON file and return its path."""
    path.write_text(json.dumps(content))
    return path


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes in the block, as if the disk was full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
