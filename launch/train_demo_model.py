#!/usr/bin/env python3
"""Train the demo's language model and its tokenizer from scratch on the documentation of the standard library.

    python launch/train_demo_model.py --output_dir sparseforge_ds/assets/stdlib_llama

Plain PyTorch on one process. The model is small and trained for long, because an undertrained model can be pruned for
free and would show nothing. At the end it prints the held-out perplexity of the dense model and of its one-shot
magnitude 2:4 projection, and writes a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sparseforge_ds.train.stdlib_text import stdlib_documents

# Shapes: B sequences in a batch, T tokens of a sequence, V vocabulary, O x I a weight, N tokens of a split.

BOS, EOS = 1, 2


def train_tokenizer(documents: list[str], vocab_size: int, folder: Path) -> None:
    """Train a sentencepiece BPE tokenizer with byte fallback and write it as a Hugging Face tokenizer."""
    with tempfile.TemporaryDirectory() as scratch:
        sentencepiece.SentencePieceTrainer.train(
            # sentencepiece trains on lines; runs of blanks are layout that the model should see
            sentence_iterator=iter([line for text in documents for line in text.splitlines() if line.strip()]),
            model_prefix=f"{scratch}/tokenizer",
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=1.0,
            max_sentence_length=1 << 20,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            unk_id=0,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
        (folder / "tokenizer.model").write_bytes(Path(f"{scratch}/tokenizer.model").read_bytes())
