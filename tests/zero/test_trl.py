"""TRL's trainers whose loss is their own: distillation and rewards on what the student writes, and preferences."""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, TrainerCallback

from sparseforge_ds.cli.main import main
from sparseforge_ds.export.inspection import inspect
from sparseforge_ds.integrations.mask_callback import MaskKeeperCallback
from sparseforge_ds.integrations.trainer_batches import task_micro_batch, trained_tokens
from tests.distributed import run_distributed
from tests.sparse_folders import sparse_model
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer, write_model
from tests.tiny_models import tiny_llama
from tests.zero.case import added_up

pytest.importorskip("trl", reason="the extra `test` installs trl")

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10


class Messages(logging.Handler):
    """Warnings of our package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def deepspeed_json(stage: int, **block: Any) -> dict[str, Any]:
    """Return the JSON of transformers' documentation, with masks that freeze at 60% of the steps."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage},
        "sparseforge": {"method": {"update_every": 1, "hardening": [0.0, 0.6]}, **block},
    }


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
    args = DistillationConfig(
        str(Path(folder, "out")),
        deepspeed=deepspeed_json(2, **block),
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
    # Note the tokens that the curvature divides by, beside those that the loss divides by.
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
    # What the test asks of the run.
    logged = [entry for entry in trainer.state.log_history if "curvature/mean" in entry]
    weights = dict(trainer.model.named_parameters())
    groups = [weights[weight.name].view(-1, 4) for weight in trainer.forge.weights]
    return {
        "curvature": [entry["curvature/mean"] for entry in logged],
        "sparse": all(bool((group != 0).sum(1).eq(2).all()) for group in groups),
        "said": [message for message in messages.said if "no gradient" in message],
        "trained": trained,
    }


def in_step_and_by_probe(folder: str) -> list[dict[str, Any]]:
    return [distilled(folder), distilled(folder, curvature={"source": "probe"})]


def test_a_model_is_distilled_from_itself_on_its_own_texts(tmp_path: Path) -> None:
    (in_step, probed), (_, _) = run_distributed(in_step_and_by_probe, 2, str(tmp_path))
    assert in_step["sparse"] and probed["sparse"]
    first, *later = in_step["curvature"]
    assert first == 0 and all(mean > 0 for mean in later), "the divergence of equal models has no gradient"
    (warning,) = in_step["said"]
    assert "up to step 1" in warning and "masks move by the size of the weights until it has one" in warning
    assert all(divisor == pytest.approx(items / 2 / 2) for divisor, items in in_step["trained"])
    assert all(mean > 0 for mean in probed["curvature"]), "a probe measures the task loss of the completions"
    assert not probed["said"]


SHORT = 4
SAVE = 2
"""Masks move after steps 1 to 3, where they freeze."""
SHAPE = {"vocab_size": 258, "num_hidden_layers": 1, "eos_token_id": 257, "bos_token_id": 256}
"""Shape of a small Llama; its vocabulary has no token that the tokenizer has not."""


SCHEDULED = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
}
"""DeepSpeed's own optimizer and scheduler, as transformers' documentation has them."""


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a number that differs from text to text."""
    return [float(sum(map(ord, text)) % 97) for text in completions]


def kinds(dense: str) -> dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]]:
    """Return trainer, class of arguments, arguments, and more arguments of the trainer, by a name."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import trl
    from trl.experimental import gkd, gold, online_dpo

    short = {"max_completion_length": 6}
    taught = {"teacher_model": tiny_llama(seed=1, **SHAPE)}
    rewarded = {"reward_funcs": reward}
    pairs = {"num_generations": 2, **short}
    gold_arguments = {"lmbda": 0.7, "use_uld_loss": True, "teacher_tokenizer_name_or_path": dense, **short}
    gkd_arguments = {"max_new_tokens": 6, "lmbda": 0.7, "seq_kd": True}
    return {
        "distillation": (trl.DistillationTrainer, trl.DistillationConfig, short, taught),
        "gkd": (gkd.GKDTrainer, gkd.GKDConfig, gkd_arguments, taught),
        "gold": (gold.GOLDTrainer, gold.GOLDConfig, gold_arguments, taught),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig, pairs, rewarded),
        "rloo": (trl.RLOOTrainer, trl.RLOOConfig, pairs, rewarded),
        "online dpo": (
            online_dpo.OnlineDPOTrainer,
            online_dpo.OnlineDPOConfig,
            {"max_new_tokens": 6},
            {"ref_model": tiny_llama(**SHAPE), **rewarded},  # which it cannot copy under ZeRO-3
        ),
        "dpo": (trl.DPOTrainer, trl.DPOConfig, {}, {}),
        "sft": (trl.SFTTrainer, trl.SFTConfig, {}, {}),
    }


def examples_for(name: str) -> list[dict[str, Any]]:
    """Return prompts, with answers or conversations where a trainer takes them."""
    rows = []
    for i in range(8 * SHORT):
        prompt = f"document {i} "
        answer = f"has {i * i}"
        more: dict[str, Any] = {}
        if name in ("gkd", "gold"):
            more = {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        elif name == "dpo":
            more = {"prompt": prompt, "chosen": answer, "rejected": f"lacks {i}"}
        elif name == "sft":
            more = {"prompt": prompt, "completion": answer}
        rows.append(more or {"prompt": prompt})
    return rows


def trl_trainer(name: str, out: Path, stage: int, teacher: str | None = None) -> Any:
    """Return a trainer of 8 sequences a step."""
    from datasets import Dataset

    from sparseforge_ds.integrations.transformers import SparseForgeMixin

    dense = str(out.parent / "dense")
    kind, arguments_class, arguments, more = kinds(dense)[name]
    # The trainer's own arguments, at eight sequences a step.
    own = SCHEDULED if name == "sft" else {}
    args = arguments_class(
        str(out),
        deepspeed={**deepspeed_json(stage), **own},
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_steps=SAVE,
        max_steps=SHORT,
        logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **arguments,
    )
    model = tiny_llama(**SHAPE)
    model.config._name_or_path = dense  # as `from_pretrained` leaves it: trainers load their reference from it
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    # The mixin on top of TRL's class.
    return type(f"SparseForge{kind.__name__}", (SparseForgeMixin, kind), {})(
        model=model,
        args=args,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(examples_for(name)),
        teacher=teacher,
        **more,
    )


def masters(forge: Any) -> dict[str, Tensor]:
    """Return the prunable weights as they were published, whole. Collective."""
    sharded = forge.sharded
    parts = {}
    for name, shard in sharded.shards.items():
        parts["", name] = torch.zeros(sharded.prunable[name].numel)
        parts["", name][shard.start : shard.stop] = shard.slice_of_flat(sharded.layout.flats[shard.flat].detach())
    gathered = added_up(parts, sharded.layout.replicated)
    return {name: gathered["", name].view(sharded.prunable[name].shape) for name in sharded.shards}


class Generations(TrainerCallback):
    """Watch over a policy that writes: with the published weights, and under masks that stand still."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.count = 0
        self.published: dict[str, Tensor] = {}
        self.generate = trainer.model.generate
        trainer.model.generate = self.watched
        trainer.add_callback(self)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.published = masters(self.trainer.forge)

    def watched(self, *args: Any, **kwargs: Any) -> Any:
        before = self.masks()
        self.check()
        written = self.generate(*args, **kwargs)
        self.check()
        assert all(torch.equal(before[name], mask) for name, mask in self.masks().items())
        self.count += 1
        return written

    def masks(self) -> dict[str, Tensor]:
        sharded = self.trainer.forge.sharded
        return {name: sharded.state.mask(shard).clone() for name, shard in sharded.shards.items()}

    def check(self) -> None:
        for name, weight in self.published.items():
            assert torch.equal(self.trainer.model.get_parameter(name), weight), name


def trained_by_trl(name: str, folder: str, stage: int) -> dict[str, Any]:
    """Train, train again from a checkpoint in the middle, and compare."""
    out = Path(folder, f"{name}{stage}")
    trainer, again = trl_trainer(name, out, stage), trl_trainer(name, Path(f"{out} again"), stage)
    generations = Generations(trainer)
    trainer.train()
    weights = masters(trainer.forge)
    again.train(resume_from_checkpoint=str(out / f"checkpoint-{SAVE}"))
    losses, resumed = (
        [entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (trainer, again)
    )
    return {
        "generations": generations.count,
        "resumed": all(torch.equal(value, weights[key]) for key, value in masters(again.forge).items()),
        "losses": (losses, resumed),
        "sparse": all(bool((weight.view(-1, 4) != 0).sum(1).eq(2).all()) for weight in weights.values()),
        "scheduler": type(trainer.deepspeed.lr_scheduler).__name__,
    }


def refusal_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    raise AssertionError("it was taken")


def every_trainer(folder: str, example: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {name: {} for name in kinds(folder)}
    for name, stages in results.items():
        for stage in (2, 3):
            stages[stage] = trained_by_trl(name, folder, stage)
    dense = str(Path(folder, "dense"))
    results["refused"] = {
        name: refusal_of(lambda name=name: trl_trainer(name, Path(folder, "refused"), 2, teacher=dense))
        for name in ("distillation", "gkd", "grpo", "online dpo")
    }
    # The example, from a dense model and from one that is 2:4.
    for more in ([], ["--keep_mask", "true", "--model", str(Path(folder, "sparse"))]):
        out = str(Path(folder, "kept" if more else "example"))
        sys.argv = ["onpolicy_trainer.py", *example, "--output_dir", out, *more]
        runpy.run_path(str(ROOT / "examples" / "onpolicy_trainer.py"), run_name="__main__")
    return results


@pytest.fixture(scope="module")
def by_trl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trl")
    write_model(folder / "dense", tiny_llama(**SHAPE))
    write_model(folder / "teacher", tiny_llama(seed=1, **SHAPE))  # a copy would have no gradient in so few steps
    write_model(folder / "sparse", sparse_model(LlamaForCausalLM.from_pretrained(folder / "dense"), {}))
    lines = [json.dumps({"text": f"What is {i}?\nIt is {i} and no more."}) for i in range(40)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    example = ["--deepspeed", str(ROOT / "examples" / "zero2.json"), "--use_cpu", "--report_to", "none"]
    example += ["--max_steps", "5", "--max_completion_length", "6", "--per_device_train_batch_size", "2"]
    example += ["--model", str(folder / "dense"), "--teacher", str(folder / "teacher")]
    example += ["--text", str(folder / "text.jsonl"), "--learning_rate", "1e-2"]
    return folder, run_distributed(every_trainer, 2, str(folder), example)[0]


TRAINERS = ("distillation", "gkd", "gold", "grpo", "rloo", "online dpo", "dpo", "sft")


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_makes_a_sparse_model(by_trl: tuple[Path, dict[str, Any]], name: str) -> None:
    """Compare at ZeRO 2 and 3, and bit for bit from a checkpoint while masks move."""
    stages = by_trl[1][name]
    for run in stages.values():
        assert run["sparse"]
        losses, resumed = run["losses"]
        assert len(losses) == SHORT and resumed == losses
        assert run["resumed"]
        assert (run["scheduler"] == "WarmupDecayLR") == (name == "sft"), run["scheduler"]
        assert run["generations"] == 0 if name in ("dpo", "sft") else run["generations"] >= SHORT


def test_a_teacher_beside_a_loss_of_the_trainers_own_is_refused(by_trl: tuple[Path, dict[str, Any]]) -> None:
    refused = by_trl[1]["refused"]
    for name, loss in (
        ("distillation", "DistillationTrainer.compute_loss"),
        ("gkd", "GKDTrainer.compute_loss"),
        ("grpo", "GRPOTrainer.compute_loss"),
        ("online dpo", "ref_model"),
    ):
        assert f"{loss} is another loss than the teacher's" in refused[name]


def test_the_example_distils_on_the_students_own_answers(by_trl: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, _ = by_trl
    for name in ("example", "kept"):
        assert inspect(folder / name).ok
        assert main(["consolidate", "--skip_proof", str(folder / name), str(tmp_path / name)]) == 0
    before, after = (LlamaForCausalLM.from_pretrained(path) for path in (folder / "sparse", tmp_path / "kept"))
    moved = 0.0
    for layer, trained in zip(before.model.layers, after.model.layers, strict=True):
        assert torch.equal(trained.mlp.up_proj.weight == 0, layer.mlp.up_proj.weight == 0)
        moved += float((trained.mlp.up_proj.weight - layer.mlp.up_proj.weight).abs().sum())
    assert moved > 0


def test_the_dense_model_of_the_guide_writes_behind_prompts_of_several_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer, like that of most Llamas, has no token for padding."""
    monkeypatch.chdir(tmp_path)
    prompts = ["The module ", "Of another length is this one, which "]
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    page = (ROOT / "docs" / "guides" / "on-policy.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "pipeline" in block)
    dense = ROOT / "sparseforge_ds" / "assets" / "stdlib_llama"
    exec(block.replace("the/dense/reasoner", str(dense)).replace("4096", "4"))
    texts = [json.loads(line)["text"] for line in Path("traces.jsonl").read_text().splitlines()]
    assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))


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
    batch = task_micro_batch(written, model)
    assert batch.token_BS.tolist() == [[0, 5, 8, 9, 0], [6, 7, 10, 11, 12]]
    assert batch.label_BS.tolist() == [[-100, -100, 8, 9, -100], [-100, -100, 10, -100, 12]]
    assert {key: value.tolist() for key, value in batch.extra_inputs.items()} == {
        "attention_mask": [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    }
    trained = trained_tokens(written, model)
    assert trained is not None and int(trained) == 4
    pairs = {"input_ids": ids([3, 4, 5]), "completion_mask": ids([0, 1, 1]), "ref_chosen_logps": torch.zeros(1)}
    batch = task_micro_batch(pairs, model)
    assert batch.label_BS.tolist() == [[-100, 4, 5]] and not batch.extra_inputs
    assert trained_tokens({"input_ids": ids([3])}, model) is None
    with pytest.raises(ValueError, match="have no labels.*but input_ids, rewards: the trainer has a loss of its own"):
        task_micro_batch({"input_ids": ids([3]), "rewards": ids([1])}, model)


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
