"""transformers' Trainer with accelerate's sequence parallelism, which is DeepSpeed's Ulysses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainingArguments

from sparseforge_ds.integrations.trainer_settings import let_ranks_share_sequences
from tests.distributed import run_distributed
from tests.tiny_folders import BYTE_VOCABULARY, write_model
from tests.tiny_models import tiny_llama
from tests.zero.test_trainer import STEPS, deepspeed_json, losses_of, said, weights_of

LENGTH = 16


def even(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Sequences of one length with prompts of many, and the positions that DeepSpeed asks for."""
    ids = torch.tensor([example["input_ids"] for example in examples])
    position_ids = torch.arange(LENGTH).repeat(len(examples), 1)
    labels = ids.masked_fill(position_ids < ids[:, :1] % (LENGTH - 2), -100)
    return {"input_ids": ids, "labels": labels, "position_ids": position_ids}


def trainer_of(out: str, stage: int, teacher: str | None = None, clip: float = 0.0, **block: Any) -> Any:
    """Return a trainer of 12 sequences a step, which all ranks share.

    Where a mask is chosen on them, they are read in order: one rank takes the first ones of the set for that, and
    several take those of the first step.
    """
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    from sparseforge_ds.integrations.transformers import SparseForgeTrainer

    # One rank trains whole sequences; several share each by accelerate's configuration.
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
        max_grad_norm=clip,
        save_strategy="steps",
        save_steps=STEPS,
        parallelism_config=shared,
        train_sampling_strategy="sequential" if "importance" in block else "random",
    )
    # The same sequences and weights on any ranks.
    generator = torch.Generator().manual_seed(5)
    rows = [{"input_ids": torch.randint(0, 256, (LENGTH,), generator=generator).tolist()} for _ in range(12 * STEPS)]
    torch.manual_seed(1)
    return SparseForgeTrainer(
        model=tiny_llama(vocab_size=BYTE_VOCABULARY).eval(),
        args=args,
        train_dataset=rows,
        data_collator=even,
        teacher=teacher,
    )


def trained(out: str, block: dict[str, Any], teacher: str | None) -> tuple[list[float], str]:
    """Return the losses, and the messages about clipping at stage 2."""
    trainer = trainer_of(out, 3, teacher, **block)
    trainer.model_accepts_loss_kwargs = False  # the mean over a micro-batch, as where ranks share sequences
    trainer.train()
    return losses_of(trainer), said(lambda: trainer_of(out, 2, clip=1.0))


CASES: dict[str, dict[str, Any]] = {
    "its own loss": {},
    "teacher and probes": {"curvature": {"source": "probe"}},
    "chosen before the first step": {
        "method": {"name": "naive_retrain"},
        "importance": "fisher",
        "curvature": {"first_probes": 1},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_whose_ranks_share_sequences_trains_alike(tmp_path: Path, case: str) -> None:
    """Train with curvature of the step, with passes of its own, and with passes before the first step.

    The second draws labels beside a teacher; the third starts from a model in evaluation mode, as it was loaded.
    """
    block = CASES[case]
    taught = case == "teacher and probes"
    model = tiny_llama(seed=1, vocab_size=BYTE_VOCABULARY)
    teacher = str(write_model(tmp_path / "teacher", model)) if taught else None
    undivided, parts = (
        run_distributed(trained, ranks, str(tmp_path / str(ranks)), block, teacher)[0] for ranks in (1, 2)
    )
    assert parts[0] == pytest.approx(undivided[0], abs=1e-5)
    assert undivided[1] == "accepted" and "max_grad_norm = 1 would clip 2 times as hard" in parts[1]
    of_one, two = (weights_of(tmp_path / str(ranks) / f"checkpoint-{STEPS}") for ranks in (1, 2))
    for name, value in of_one.items():
        assert ((two[name] == 0) == (value == 0)).all(), name
        # A teacher's loss leaves some weights next to no gradient, whose rounding decides their way.
        assert (two[name] - value).abs().max() < (1e-4 if taught else 1e-5), name
        assert (two[name] - value).abs().mean() < 1e-6, name


def test_a_teacher_that_cannot_share_sequences_is_refused() -> None:
    student, teacher = tiny_llama(), tiny_llama(num_key_value_heads=1)
    with pytest.raises(ValueError, match="with a teacher of .*'num_key_value_heads': 1.* exchanges tokens for heads"):
        let_ranks_share_sequences(teacher, student)
    with pytest.raises(ValueError, match=r"config.json has {'attention_dropout': 0.1}.*set them to 0.0"):
        let_ranks_share_sequences(tiny_llama(attention_dropout=0.1), student)
