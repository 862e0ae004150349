"""`--document_attention` through the launcher: every document of a sequence as if it were alone in it."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from sparseforge_ds.data.batches import Batches
from sparseforge_ds.data.micro_batch import BatchLayout
from sparseforge_ds.data.token_cache import open_tokens
from sparseforge_ds.data.windows import CachedWindows, document_starts, ids_of_tokens
from tests.distributed import run_distributed
from tests.end_to_end.test_layouts import assert_same, flags
from tests.end_to_end.test_layouts import states as weights
from tests.end_to_end.test_resume import continued
from tests.end_to_end.test_train import differences, run_trainer, states, train
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer, write_model, write_text
from tests.tiny_models import tiny_opt

S = 32
BATCH = 12


def alone(network: Any, documents: list[Tensor]) -> float:
    """Mean over the tokens of documents that never share a sequence."""
    total, count = 0.0, 0
    with torch.no_grad():
        for ids in documents:
            logits_SV = network(input_ids=ids[None]).logits[0, :-1].double()
            total += float(cross_entropy(logits_SV, ids[1:], reduction="sum"))
            count += len(ids) - 1
    return total / count


def scalar(run: Path, tag: str, step: int) -> float:
    log = EventAccumulator(str(run / "tensorboard"))
    log.Reload()
    return next(event.value for event in log.Scalars(tag) if event.step == step)


def test_losses_are_those_of_the_documents_alone_and_runs_go_on(tmp_path: Path) -> None:
    """Two ranks, and the teacher; perplexity while training; resumed bit for bit; and ranks that share sequences."""
    run = tmp_path / "run"
    held_out = tmp_path / "held_out.jsonl"
    block = {"curvature": {"source": "probe"}}
    common: dict[str, Any] = {"document_attention": True, "log_every": 1}
    flags(tmp_path, block, 3, 3, run)  # writes the model
    write_text(held_out, documents=20)
    evaluated = {"eval_dataset": held_out, "eval_sequences": 0, "eval_every": 0}
    run_flags = flags(tmp_path, block, 3, 3, run, **common, **evaluated)
    train(*run_flags)

    # Cut the batch of step 1 into its documents, and score each alone.
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    (cache,) = (run / "data").glob("*.json")
    record = json.loads(cache.read_text())
    windows = CachedWindows(open_tokens(cache.with_suffix(".bin"), record["dtype"], record["tokens"]), "text", S, 0, 1)
    row_BS = Batches([windows], [1], BatchLayout(BATCH, 1, 1, 0)).rows_at(0)
    assert document_starts(row_BS).any(1).mean() > 0.3, "few sequences are of one document"
    documents = []
    for row in row_BS:
        starts = [0, *(int(position) for position in document_starts(row).nonzero()[0] if position), S]
        documents += [
            torch.from_numpy(ids_of_tokens(row)[a:b].astype("int64")) for a, b in zip(starts, starts[1:], strict=False)
        ]
    assert scalar(run, "loss/cross_entropy", 1) == pytest.approx(alone(network, documents), rel=1e-6)
    assert abs(scalar(run, "loss/kl", 1)) < 1e-9, "the teacher sees what the student sees"

    # The same for the held-out text: documents, cut where windows end.
    lines = [json.loads(line)["text"] for line in held_out.read_text().splitlines()]
    scored = []
    position = 0
    total = sum(len(line) + 1 for line in lines) // S * S
    for line in lines:
        ids = torch.tensor([256, *byte_tokenizer()(line)["input_ids"]])[: total - position]
        cuts = [0, *(cut for cut in range(S - position % S, len(ids), S)), len(ids)]
        scored += [ids[a:b] for a, b in itertools.pairwise(cuts) if b > a]
        position += len(ids)
    assert scalar(run, "eval/perplexity", 0) == pytest.approx(math.exp(alone(network, scored)), rel=1e-6)

    # A resumed run has the same bits; ranks that share sequences the same numbers, up to rounding.
    resumed = continued(run_flags, run, 3)
    both_runs = (states(folder / "checkpoints" / "step_000008") for folder in (run, resumed))
    assert differences(*both_runs) == []
    shared = tmp_path / "shared"
    train(*flags(tmp_path, block, 2, 6, shared, **common, **evaluated, sequence_parallel=2))
    # A first token sees itself alone: its query has a gradient of rounding.
    assert_same(shared, weights(run), bound=1e-5)
    for tag, step in (("loss/cross_entropy", 1), ("eval/perplexity", 0), ("eval/perplexity", 8)):
        assert scalar(shared, tag, step) == pytest.approx(scalar(run, tag, step), rel=1e-6), tag


def test_a_model_that_mixes_documents_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model", tiny_opt(vocab_size=BYTE_VOCABULARY, pad_token_id=0))
    write_text(tmp_path / "text.jsonl")
    run_flags = flags(tmp_path, {}, 1, 6, tmp_path / "run", document_attention=True)
    assert run_distributed(run_trainer, 2, run_flags) == [1, 1]
    output = capfd.readouterr()
    assert "(OPTForCausalLM, attention sdpa) lets the documents of a sequence see each other" in output.out + output.err
    assert not (tmp_path / "run" / "checkpoints" / "latest").exists()
