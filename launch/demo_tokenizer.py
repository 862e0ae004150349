"""The tokenizer of the demo's model, which `train_demo_model.py` trains beside it."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import sentencepiece
import torch
from torch import Tensor
from transformers import AutoTokenizer

UNK, BOS, EOS = 0, 1, 2


def train_tokenizer(documents: list[str], vocab_size: int, folder: Path) -> None:
    """Train a sentencepiece BPE tokenizer with byte fallback and write it for ``AutoTokenizer``."""
    with tempfile.TemporaryDirectory() as scratch:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([line for text in documents for line in text.splitlines() if line.strip()]),
            model_prefix=f"{scratch}/tokenizer",
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,
            max_sentence_length=1 << 20,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,  # indentation is part of this text
            allow_whitespace_only_pieces=True,
            split_digits=True,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
        shutil.copyfile(f"{scratch}/tokenizer.model", folder / "tokenizer.model")
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "legacy": False,
    }
    (folder / "tokenizer.json").unlink(missing_ok=True)  # of an earlier run
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(scratch)
        shutil.copyfile(f"{scratch}/tokenizer.json", folder / "tokenizer.json")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer into another folder."""
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json"):
        if source.resolve() != folder.resolve():
            shutil.copyfile(source / name, folder / name)


def encode(documents: list[str], folder: Path) -> Tensor:
    """Return all documents as one stream of token ids, each between ``<s>`` and ``</s>``."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return torch.tensor([token for ids in processor.encode(documents) for token in (BOS, *ids, EOS)])
