"""transformers' Trainer with accelerate's sequence parallelism, which is DeepSpeed's Ulysses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainingArguments

from tests.distributed import run_distributed
from tests.tiny_folders import BYTE_VOCABULARY
from tests.tiny_models import tiny_llama
from tests.zero.test_trainer import STEPS, deepspeed_json, losses_of, weights_of

LENGTH = 16


def even(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Sequences of one length, with the positions that DeepSpeed asks for."""
    ids = torch.tensor([example["input_ids"] for example in examples])
    return {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(LENGTH).repeat(len(examples), 1)}


def trainer_of(out: str, stage: int, teacher: str | None = None, **block: Any) -> Any:
    """A trainer of 12 sequences a step, which all ranks share."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    from sparseforge_ds.integrations.transformers import SparseForgeTrainer

    parts = torch.distributed.get_world_size()
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    shared = ParallelismConfig(sp_size=parts, sp_backend="deepspeed", sp_handler=handler) if parts > 1 else None
    args = TrainingArguments(
        out,
        deepspeed=deepspeed_json(stage, **block),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=4,
        max_steps=STEPS,
        learning_rate=3e-3,
        logging_steps=1,
        max_grad_norm=0.0,
        save_strategy="steps",
        save_steps=STEPS,
        parallelism_config=shared,
    )
    generator = torch.Generator().manual_seed(5)
    rows = [{"input_ids": torch.randint(0, 256, (LENGTH,), generator=generator).tolist()} for _ in range(12 * STEPS)]
    torch.manual_seed(1)
    return SparseForgeTrainer(
        model=tiny_llama(vocab_size=BYTE_VOCABULARY),
        args=args,
        train_dataset=rows,
        data_collator=even,
        teacher=teacher,
    )


def trained(out: str, block: dict[str, Any]) -> list[float]:
    trainer = trainer_of(out, 3, **block)
    trainer.train()
    if torch.distributed.get_world_size() > 1:
        with pytest.raises(ValueError, match="sp_size = 2 with a teacher"):
            trainer_of(out, 3, teacher="a folder")
    return losses_of(trainer)


BLOCKS: dict[str, dict[str, Any]] = {
    "training": {},
    "labels drawn": {"importance": "gauss_newton"},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_trainer_whose_ranks_share_sequences(tmp_path: Path, name: str) -> None:
    """With curvature that rides on the step, and with passes of its own."""
    whole, parts = (run_distributed(trained, ranks, str(tmp_path / str(ranks)), BLOCKS[name])[0] for ranks in (1, 2))
    assert parts == pytest.approx(whole, abs=1e-5)
    one, two = (weights_of(tmp_path / str(ranks) / f"checkpoint-{STEPS}") for ranks in (1, 2))
    for name, value in one.items():
        assert ((two[name] == 0) == (value == 0)).all(), name
        assert (two[name] - value).abs().max() < 1e-5, name
