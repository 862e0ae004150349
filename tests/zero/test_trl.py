"""TRL's trainers whose loss is their own: distillation on what the student writes."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseforge_ds.integrations.mask_callback import MaskKeeperCallback
from sparseforge_ds.integrations.trainer_batches import task_micro_batch, trained_tokens
from tests.distributed import run_distributed
from tests.sparse_folders import sparse_model
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer
from tests.tiny_models import tiny_llama

pytest.importorskip("trl", reason="the extra `test` installs trl")

STEPS = 10


class Messages(logging.Handler):
    """Warnings of our package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def distilled(folder: str, **block: Any) -> dict[str, Any]:
    """Train a model from itself, on texts that it writes."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    from sparseforge_ds.integrations.transformers import SparseForgeMixin

    class SparseForgeDistillationTrainer(SparseForgeMixin, DistillationTrainer):
        pass

    torch.manual_seed(0)
    model = tiny_llama(vocab_size=BYTE_VOCABULARY, num_hidden_layers=1)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    method = {"update_every": 1, "hardening": [0.0, 0.6]}
    args = DistillationConfig(
        str(Path(folder, "out")),
        deepspeed={
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 2},
            "sparseforge": {"method": method, **block},
        },
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        max_completion_length=6,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    )
    trainer = SparseForgeDistillationTrainer(
        model=model,
        teacher_model=copy.deepcopy(model),
        args=args,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": f"document {i} "} for i in range(8 * STEPS)]),
    )
    trained: list[tuple[float, float]] = []
    divided_by = type(trainer).compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = divided_by(self, model, inputs, *args, **kwargs)
        if self.forge.config.measures_in_step(self.forge.step_count + 1):
            trained.append((self.forge.curvature.sums.divisor, float(inputs["num_items_in_batch"])))
        return loss

    type(trainer).compute_loss = compute_loss
    messages = Messages()
    logging.getLogger("sparseforge_ds").addHandler(messages)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "curvature/mean" in entry]
    weights = dict(trainer.model.named_parameters())
    groups = [weights[weight.name].view(-1, 4) for weight in trainer.forge.weights]
    return {
        "curvature": [entry["curvature/mean"] for entry in logged],
        "sparse": all(bool((group != 0).sum(1).eq(2).all()) for group in groups),
        "said": [message for message in messages.said if "no gradient" in message],
        "trained": trained,
    }


def both(folder: str) -> list[dict[str, Any]]:
    return [distilled(folder), distilled(folder, curvature={"source": "probe"})]


def test_a_model_is_distilled_from_itself_on_its_own_texts(tmp_path: Path) -> None:
    (heard, probed), (_, _) = run_distributed(both, 2, str(tmp_path))
    assert heard["sparse"] and probed["sparse"]
    first, *later = heard["curvature"]
    assert first == 0 and all(mean > 0 for mean in later), "the divergence of equal models has no gradient"
    (warning,) = heard["said"]
    assert "up to step 1" in warning and "masks move by the size of the weights until it has one" in warning
    assert all(divisor == pytest.approx(items / 2 / 2) for divisor, items in heard["trained"])
    assert all(mean > 0 for mean in probed["curvature"]), "a probe measures the task loss of the completions"
    assert not probed["said"]


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def test_completions_are_the_labels_of_a_probe() -> None:
    model = tiny_llama()
    written = {
        "prompt_ids": ids([0, 5], [6, 7]),
        "prompt_mask": ids([0, 1], [1, 1]),
        "completion_ids": ids([8, 9, 0], [10, 11, 12]),
        "completion_mask": ids([1, 1, 0], [1, 1, 1]),
        "tool_mask": ids([1, 1, 1], [1, 0, 1]),
        "num_items_in_batch": torch.tensor(4),
    }
    batch = task_micro_batch(written, None, model)
    assert batch.token_BS.tolist() == [[0, 5, 8, 9, 0], [6, 7, 10, 11, 12]]
    assert batch.label_BS.tolist() == [[-100, -100, 8, 9, -100], [-100, -100, 10, -100, 12]]
    assert {key: value.tolist() for key, value in batch.more.items()} == {
        "attention_mask": [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    }
    trained = trained_tokens(written, model)
    assert trained is not None and int(trained) == 4
    pairs = {"input_ids": ids([3, 4, 5]), "completion_mask": ids([0, 1, 1]), "ref_chosen_logps": torch.zeros(1)}
    batch = task_micro_batch(pairs, None, model)
    assert batch.label_BS.tolist() == [[-100, 4, 5]] and not batch.more
    assert trained_tokens({"input_ids": ids([3])}, model) is None
    with pytest.raises(ValueError, match="have no labels.*but input_ids, rewards: the trainer has a loss of its own"):
        task_micro_batch({"input_ids": ids([3]), "rewards": ids([1])}, None, model)


def test_sft_keeps_the_zeros_of_a_sparse_model_without_deepspeed(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    shape = {"vocab_size": BYTE_VOCABULARY, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}
    zeros: dict[str, Tensor] = {}
    model = sparse_model(tiny_llama(**shape), zeros)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    keeper = MaskKeeperCallback()
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            str(tmp_path), max_steps=2, use_cpu=True, bf16=False, report_to=[], weight_decay=0.1, disable_tqdm=True
        ),
        train_dataset=Dataset.from_list([{"text": f"Document {i} counts {i * i}."} for i in range(16)]),
        processing_class=tokenizer,
        callbacks=[keeper],
    )
    trainer.train()
    assert keeper.keeper is not None and keeper.keeper.pruned.keys() == zeros.keys()
    for name, zero in zeros.items():
        assert torch.equal(trainer.model.get_parameter(name) == 0, zero), name
