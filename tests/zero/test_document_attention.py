"""Models that keep the documents of a sequence apart, found by running them, also where ranks share sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparseforge_ds.ranks import AgreedError
from sparseforge_ds.train.document_attention import check_document_attention, check_documents_apart, within_documents
from sparseforge_ds.train.ulysses import SequenceParallel
from tests.distributed import run_distributed
from tests.tiny_models import BUILDERS, VOCABULARY
from tests.unit.model.test_sequence_parallel import DIVIDED

MIXED = {"falcon", "gpt_oss", "opt", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
"""Families that ignore where positions begin anew: in masks that they make themselves, or in linear attention."""


def every_family() -> dict[str, str]:
    """Refusals, by family."""
    refused: dict[str, str] = {}
    for family, build in BUILDERS.items():
        try:
            check_documents_apart(build(), f"--model {family}")
        except AgreedError as error:
            refused[family] = str(error)
    return refused


def test_families_keep_documents_apart_or_are_refused() -> None:
    (refused,) = run_distributed(every_family, 1)
    assert refused.keys() == MIXED
    for family, error in refused.items():
        assert error.startswith(f"--document_attention: --model {family} (") and "leave the flag out" in error


def shared() -> dict[str, str]:
    """Refusals of families whose sequences two ranks share, with and without a mask for their documents."""
    refused: dict[str, str] = {}
    sequence = SequenceParallel(2)
    for document_attention in (False, True):
        sequence.document_attention = document_attention
        for family in DIVIDED if document_attention else DIVIDED[:1]:
            model = BUILDERS[family]()
            with _own(model, sequence):
                sequence.check_division(model, family)
                try:
                    check_documents_apart(model, f"--model {family}", sequence.rank, sequence.size)
                except AgreedError as error:
                    refused[f"{family}, {document_attention}"] = str(error)
    return refused


@contextmanager
def _own(model: PreTrainedModel, sequence: SequenceParallel) -> Iterator[None]:
    """Run the divided model by attention that the process has no longer."""
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    sequence.divide(model)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attention


def test_documents_of_shared_sequences_are_apart_by_a_mask_alone() -> None:
    for refused in run_distributed(shared, 2):
        assert refused.keys() == {f"{DIVIDED[0]}, False"}


def test_a_model_without_positions_is_refused_before_it_is_loaded() -> None:
    with torch.device("meta"):
        model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match=r"--model b \(BloomForCausalLM\) takes no position_ids"):
        check_document_attention(model, "--model b")


def one_sequence(_: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any) -> Any:
    """Goes by positions as flash attention of transformers does: of one sequence at a time, and without a mask."""
    position_BS = more["position_ids"]
    assert mask is None
    documents = (position_BS == 0).cumsum(1) if len(query) == 1 else torch.zeros_like(position_BS)
    seen_BSS = (documents[:, :, None] == documents[:, None]).tril()
    groups = query.shape[1] // key.shape[1]
    key, value = (item.repeat_interleave(groups, 1) for item in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen_BSS[:, None])
    return output.transpose(1, 2), None


def flash() -> list[str]:
    """Without and with the sequences of a micro-batch behind one another."""
    messages = []
    for attention in (one_sequence, within_documents(one_sequence, flash=True)):
        ALL_ATTENTION_FUNCTIONS["flash_of_a_test"] = attention
        model = BUILDERS["llama"](num_key_value_heads=2)
        model.config._attn_implementation = "flash_of_a_test"
        try:
            check_documents_apart(model, "--model a")
        except AgreedError as error:
            messages.append(str(error))
    token_BS = torch.randint(0, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(0))
    position_BS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 6], list(range(8))])
    logits = {}
    for name in ("flash_of_a_test", "sdpa"):
        model.config._attn_implementation = name
        logits[name] = model.eval()(input_ids=token_BS, position_ids=position_BS, use_cache=False).logits
    torch.testing.assert_close(logits["flash_of_a_test"], logits["sdpa"], atol=1e-6, rtol=1e-5)
    return messages


def test_flash_attention_sees_documents_in_every_sequence_of_a_micro_batch() -> None:
    (messages,) = run_distributed(flash, 1)
    assert len(messages) == 1 and "attention flash_of_a_test" in messages[0]
