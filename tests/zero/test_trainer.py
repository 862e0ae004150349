"""transformers' Trainer and TRL's SFTTrainer, on real ranks: every stage alike, resumed, moved, exported."""

from __future__ import annotations

import json
import logging
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import DeepSpeedEngine
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    BatchEncoding,
    EarlyStoppingCallback,
    GenerationConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

import sparseforge_ds as sf
from sparseforge_ds import sharded_weights
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.cli.main import main
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.methods import SrSteConfig
from sparseforge_ds.export import counting
from sparseforge_ds.export.inspection import inspect
from sparseforge_ds.extras.basis.permutation.channels import dimensions
from sparseforge_ds.extras.basis.permutation.record import Permutation
from sparseforge_ds.integrations import trainer_settings
from sparseforge_ds.integrations.trainer_settings import intact_checkpoint, refuse_generation_config, refuse_length
from sparseforge_ds.model.basis import basis_of
from sparseforge_ds.train.objective import Objective
from tests.distributed import run_distributed
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer, write_model
from tests.tiny_models import tiny_llama, tiny_qwen3

pytest.importorskip("trl", reason="the extra `test` installs trl")

ROOT = Path(__file__).resolve().parents[2]
SAVE_CHECKPOINT = DeepSpeedEngine.save_checkpoint
STEPS = 8
SAVE = 3
"""Masks move after 1 to 5 and freeze after 6."""


def deepspeed_json(stage: int, optimizer: bool = True, **block: Any) -> dict[str, Any]:
    """Return the JSON of transformers' documentation, with the one more block."""
    params = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        **({"optimizer": {"type": "AdamW", "params": params}} if optimizer else {}),
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "sparseforge": {"method": {"update_every": 1, "hardening": [0.25, 0.75]}, **block},
    }


def rows(count: int) -> list[dict[str, list[int]]]:
    """Sequences of uneven lengths, whose first tokens are a prompt."""
    generator = torch.Generator().manual_seed(5)
    examples = []
    for _ in range(count):
        length, prompt = (int(torch.randint(*span, (), generator=generator)) for span in ((8, 20), (1, 7)))
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        examples.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return examples


def padded(examples: list[dict[str, list[int]]], least: int = 0) -> dict[str, Tensor]:
    """Pad to the longest of the micro-batch, which is another one on other ranks."""
    length = max(least, *(len(example["input_ids"]) for example in examples))

    def column(entries: Callable[[dict[str, list[int]]], list[int]], filler: int) -> Tensor:
        return torch.tensor(
            [entries(example) + [filler] * (length - len(example["input_ids"])) for example in examples]
        )

    return {
        "input_ids": column(lambda example: example["input_ids"], 0),
        "labels": column(lambda example: example["labels"], -100),
        "attention_mask": column(lambda example: [1] * len(example["input_ids"]), 0),
    }


PROMPT = torch.arange(12).view(1, 12)


class SavesInFirstStep(TrainerCallback):
    """Save the model after the first step, and keep what is said."""

    trainer: Any

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        if state.global_step == 1:
            self.said = said(lambda: self.trainer.save_model(self.folder))


def logits_of(trainer: Any) -> Tensor:
    """Return the logits of the model that is trained. Collective."""
    trainer.model_wrapped.eval()
    with torch.no_grad():
        logits: Tensor = trainer.model_wrapped(input_ids=PROMPT).logits
    return logits


def trainer_of(
    out: Path, config: dict[str, Any], micro: int, teacher: str | None = None, kind: Any = None, **more: Any
) -> Any:
    """Return a trainer of 12 sequences a step, whatever the ranks, over one epoch of `STEPS` steps."""
    from sparseforge_ds.integrations.transformers import SparseForgeTrainer

    # Arguments of the trainer itself; all others are `TrainingArguments`.
    ranks = torch.distributed.get_world_size()
    names = ("callbacks", "compute_loss_func", "eval_dataset", "data_collator", "train_dataset")
    own = {"data_collator": padded, "train_dataset": rows(12 * STEPS)}
    own |= {key: more.pop(key) for key in names if key in more}
    args = TrainingArguments(
        str(out),
        deepspeed=config,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=12 // ranks // micro,
        logging_steps=1,
        **{"learning_rate": 3e-3, "save_steps": SAVE, "num_train_epochs": 1, **more},
    )
    torch.manual_seed(1)
    model = tiny_llama(vocab_size=BYTE_VOCABULARY)
    model.config._name_or_path = str(out.parent / "model")  # as `from_pretrained` leaves it
    return (kind or SparseForgeTrainer)(
        model=model,
        args=args,
        teacher=teacher,
        **own,
    )


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights_of(folder: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint(folder)
    return {name: checkpoint.weight(name) for name in checkpoint.shapes}


def every_stage(folder: str) -> dict[str, Any]:
    """Return the losses of the runs by name; the test looks at what they save."""
    root = Path(folder)
    model = str(Path(folder, "model"))
    results: dict[str, Any] = {}
    # Distilled runs at every stage, by DeepSpeed's optimizer.
    for stage in range(4):
        trainer = trainer_of(root / f"taught{stage}", deepspeed_json(stage), 3, model)
        trainer.train()
        results[f"taught{stage}"] = losses_of(trainer)
    results["log"] = trainer.state.log_history
    for stage in (1, 3):  # its own loss, and Trainer's own optimizer
        config = deepspeed_json(stage, optimizer=False)
        del config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"]
        trainer = trainer_of(root / f"plain{stage}", config, 2, activation_checkpointing=bool(stage == 3))
        early = SaveEarly(trainer, root / "early")
        trainer.add_callback(early)
        with mock.patch.object(DeepSpeedEngine, "save_checkpoint", autospec=True, side_effect=SAVE_CHECKPOINT) as saves:
            trainer.train()
        results[f"saves{stage}"] = saves.call_count
        results[f"plain{stage}"] = losses_of(trainer)
        trainer.save_model(str(root / f"saved{stage}"))
        results[f"early{stage}"] = early.lines
    # Both kinds resumed.
    for name, stage, micro, teacher in (("taught3", 3, 3, model), ("plain1", 1, 2, None)):
        config = deepspeed_json(stage, optimizer=teacher is not None)
        trainer = trainer_of(root / f"{name} again", config, micro, teacher)
        trainer.train(resume_from_checkpoint=str(root / name / f"checkpoint-{SAVE}"))
        results[f"{name} again"] = losses_of(trainer)
    # A finished run goes on; one whose masks move cannot have another length.
    config = deepspeed_json(1, optimizer=False)
    finished = root / "plain1" / f"checkpoint-{STEPS}"
    trainer = trainer_of(root / "longer", config, 2, max_steps=STEPS + 2)
    trainer.train(resume_from_checkpoint=str(finished))
    results["longer"] = trainer.forge.step_count, losses_of(trainer)
    # Given its last step again, in the midst of an epoch, it makes no further one; it does not go back.
    at_end = str(root / "longer" / f"checkpoint-{STEPS + 2}")
    trainer = trainer_of(root / "longer again", config, 2, max_steps=STEPS + 2)
    trainer.train(resume_from_checkpoint=at_end)
    results["longer again"] = trainer.forge.step_count, trainer.state.global_step
    trainer = trainer_of(root / "longer again", config, 2, max_steps=STEPS + 1)
    results["back"] = said(lambda: trainer.train(resume_from_checkpoint=at_end))
    trainer = trainer_of(root / "other", config, 2, max_steps=STEPS + 2)
    moving = str(root / "plain1" / f"checkpoint-{SAVE}")
    results["other length"] = said(lambda: trainer.train(resume_from_checkpoint=moving))
    return results


@contextmanager
def messages() -> Iterator[list[str]]:
    """Warnings of the integration."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("sparseforge_ds.integrations")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class SaveEarly(TrainerCallback):
    """Saves the model behind the first step, and keeps what is said."""

    def __init__(self, trainer: Any, folder: Path) -> None:
        self.trainer = trainer
        self.folder = folder
        self.lines: list[str] = []

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 1:
            with messages() as lines:
                self.trainer.save_model(str(self.folder))
            self.lines += lines


def moved(folder: str, name: str, stage: int, micro: int) -> list[float]:
    """Go on from another layout's checkpoint."""
    root = Path(folder)
    trainer = trainer_of(root / f"{name} moved", deepspeed_json(stage), micro, str(root / "model"))
    trainer.train(resume_from_checkpoint=str(root / name / f"checkpoint-{SAVE}"))
    return losses_of(trainer)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trainers")
    torch.manual_seed(0)
    model = tiny_llama(vocab_size=BYTE_VOCABULARY)
    write_model(folder / "model", model)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    by_name = dimensions("llama", model.config, shapes, "mlp")
    index = {
        name: torch.arange(dimension.channels).flip(0).expand(dimension.blocks, -1)
        for name, dimension in by_name.items()
    }
    Permutation("mlp", index, {}).save(folder / "model")
    return folder, run_distributed(every_stage, 2, str(folder))[0]


def test_every_stage_trains_alike(trained: tuple[Path, dict[str, Any]]) -> None:
    _, results = trained
    for name, other_names in (("taught0", ("taught1", "taught2", "taught3")), ("plain1", ("plain3",))):
        assert len(results[name]) == STEPS
        for other in other_names:
            assert results[other] == pytest.approx(results[name], abs=1e-5)
    assert results["plain1"][-1] < results["plain1"][0]


def test_a_saved_model_has_its_sparse_weights(trained: tuple[Path, dict[str, Any]]) -> None:
    """Save with the guide's JSON, without a key for ZeRO-3."""
    folder, results = trained
    for stage in (1, 3):
        model = LlamaForCausalLM.from_pretrained(folder / f"saved{stage}")
        expected = weights_of(folder / f"plain{stage}" / f"checkpoint-{STEPS}")
        for name, value in model.named_parameters():
            assert torch.equal(value, expected[name]), name
        assert (model.model.layers[0].mlp.up_proj.weight.view(-1, 4) != 0).sum(1).eq(2).all()
        assert results[f"saves{stage}"] == 3, "steps 3, 6 and 8, each once"
        models = [path.name for path in (folder / f"plain{stage}" / f"checkpoint-{SAVE}").glob("*model.*")]
        assert models == ([] if stage == 3 else ["model.safetensors"]), "masters of ZeRO-3 have no second copy"
        assert results[f"early{stage}"] == [
            "save_model: masks are not frozen at step 1, and the weights that it writes not sparse"
        ]


def test_the_log_has_the_metrics_of_masks(trained: tuple[Path, dict[str, Any]]) -> None:
    first, second, *_, last = [entry for entry in trained[1]["log"] if "loss" in entry]
    assert {"loss/kl", "loss/cross_entropy", "mask/kept", "dials/x", "curvature/mean"} <= first.keys()
    assert second["loss/kl"] > 0 and "mask/flip_rate" in second
    assert first["loss"] == pytest.approx((first["loss/cross_entropy"] + 2 * first["loss/kl"]) / 3, rel=1e-4)
    assert "mask/kept" not in last, "masks are frozen by then"


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, results = trained
    for name in ("taught3", "plain1"):
        assert results[f"{name} again"] == results[name]
        first, again = (weights_of(folder / run / f"checkpoint-{STEPS}") for run in (name, f"{name} again"))
        assert all(torch.equal(again[key], value) for key, value in first.items())


def test_a_finished_run_goes_on(trained: tuple[Path, dict[str, Any]]) -> None:
    """Keep the same masks; while they move, another length would be another run."""
    folder, results = trained
    steps, losses = results["longer"]
    assert steps == len(losses) == STEPS + 2 and losses[:STEPS] == results["plain1"]
    before, after = (
        weights_of(folder / run / f"checkpoint-{step}") for run, step in (("plain1", STEPS), ("longer", STEPS + 2))
    )
    for name, value in before.items():
        assert torch.equal(after[name] == 0, value == 0), name
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    assert inspect(folder / "longer").ok
    assert results["longer again"] == (STEPS + 2, STEPS + 2)
    assert f"is at step {STEPS + 2} already, and the trainer makes {STEPS + 1}: give a larger max" in results["back"]
    said_of_other = results["other length"]
    assert f"is of a run of {STEPS} steps, and this one has {STEPS + 2}: masks are scheduled in" in said_of_other
    assert f"Give {STEPS} again (max_steps of sf.SparseForge, or a Trainer's max_steps or epochs)" in said_of_other


@pytest.mark.parametrize(("ranks", "name", "stage", "micro"), [(3, "taught2", 3, 2), (1, "taught3", 1, 6)])
def test_a_run_moves_to_other_ranks_and_stages(
    trained: tuple[Path, dict[str, Any]], ranks: int, name: str, stage: int, micro: int
) -> None:
    """Micro-batches are padded otherwise there, and every token still counts alike."""
    folder, results = trained
    losses = run_distributed(moved, ranks, str(folder), name, stage, micro)[0]
    assert losses == pytest.approx(results[name], abs=1e-5)
    start, end = (weights_of(folder / run / f"checkpoint-{STEPS}") for run in (name, f"{name} moved"))
    for key, value in start.items():
        assert ((end[key] == 0) == (value == 0)).all(), key
        assert (end[key] - value).abs().max() < 2e-5, key


@pytest.mark.parametrize("name", ["taught3", "plain1"])
def test_its_checkpoints_are_exported_as_they_are(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, name: str
) -> None:
    checkpoint = trained[0] / name / f"checkpoint-{STEPS}"
    for path in (checkpoint, checkpoint.parent):  # the newest of the trainer's output folder
        inspection = inspect(path)
        assert inspection.ok and inspection.status is not None
        assert (inspection.status.step, inspection.status.max_steps, inspection.status.phase) == (
            STEPS,
            STEPS,
            "finished",
        )
    source = checkpoint if name == "taught3" else checkpoint.parent
    assert main(["consolidate", "--skip_proof", str(source), str(tmp_path / "out")]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "trainer_state.json").exists()
    record = json.loads((tmp_path / "out" / "sparsity.json").read_text())
    assert record["step"] == STEPS and record["config"]["method"]["hardening"] == [0.25, 0.75]
    assert basis_of(tmp_path / "out") == basis_of(trained[0] / "model") != {}


def test_an_unfinished_checkpoint_is_exported_with_its_mask(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Export dense weights that lie beside the mask, in the manner of transformers."""
    # What is said of masks is the same where they are read in parts.
    unfinished = trained[0] / "plain1" / f"checkpoint-{SAVE}"
    read_at_once = inspect(unfinished).status
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "CHUNK", 256)
        read_in_parts = inspect(unfinished).status
    assert read_at_once is not None and read_in_parts is not None
    for one, other in zip(read_at_once.masks, read_in_parts.masks, strict=True):
        assert one.name == other.name and astuple(one)[1:] == pytest.approx(astuple(other)[1:], rel=1e-12)
    assert main(["export", "--skip_proof", str(trained[0] / "plain1" / f"checkpoint-{SAVE}"), str(tmp_path / "o")]) == 0
    assert f"not finished at step {SAVE}" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "o")]) == 0


class Seen(TrainerCallback):
    """Phases at the ends of steps."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.trainer: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.phases.append(self.trainer.forge.phase)


def mean_of_all(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Compute a loss of the user's own."""
    return torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
    ) / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


def said(work: Callable[[], Any]) -> str:
    """Return the refusal."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return "accepted"


def evaluated(folder: str) -> dict[str, Any]:
    """Try the best checkpoint, early stopping, callbacks, own losses, methods with own passes, and refusals."""
    from sparseforge_ds.integrations.transformers import SparseForgeTrainer

    root = Path(folder)
    results = {}
    # Without DeepSpeed.
    plain = TrainingArguments(str(root), use_cpu=True, report_to="none")  # before accelerate knows of DeepSpeed
    without = said(lambda: SparseForgeTrainer(model=tiny_llama(), args=plain))
    # The best checkpoint, early stopping, and what callbacks see.
    best = {
        "eval_dataset": rows(8),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    }
    watcher = Seen()
    callbacks = [watcher, EarlyStoppingCallback(early_stopping_patience=STEPS)]
    trainer = watcher.trainer = trainer_of(root / "best", deepspeed_json(2), 3, callbacks=callbacks, **best)
    evaluations = trainer.train() and [e for e in trainer.state.log_history if "eval_loss" in e]
    results["best"] = trainer.state.best_model_checkpoint, trainer.forge.step_count, trainer.evaluate()["eval_loss"]
    results["eval"] = [entry["eval_loss"] for entry in evaluations]
    results["phases"] = watcher.phases
    trainer.save_model(str(root / "saved"))
    # CAST's factors would be lost before they are folded, and are no part of the model afterwards.
    for stage in (2, 3):
        folder = root / f"cast{stage}"
        saver = SavesInFirstStep(str(folder / "early"))
        method = {"name": "cast", "frozen": 0.5, "decay": 0.1, "every": 2}
        trainer = saver.trainer = trainer_of(folder, deepspeed_json(stage, method=method), 2, callbacks=[saver])
        trainer.train()
        trainer.save_model(str(folder / "saved"))
        results[f"cast{stage}"] = saver.said, logits_of(trainer), (folder / "early").exists()
    # A checkpoint of the model alone has weights that ZeRO-3 partitions, too.
    alone = trainer_of(root / "alone", deepspeed_json(3), 2, save_only_model=True)
    alone.train()
    results["alone"] = (root / "alone" / f"checkpoint-{STEPS}" / "model.safetensors").is_file()
    # Its own loss, and a curvature that needs passes of its own.
    trainer = trainer_of(root / "own", deepspeed_json(2), 3, compute_loss_func=mean_of_all)
    trainer.train()
    results["own"] = losses_of(trainer)
    block = {"importance": "hutchinson", "curvature": {"source": "probe"}, "low_rank": {"k": 8}}
    trainer = trainer_of(root / "probe", deepspeed_json(3, **block), 3)
    trainer.train()
    results["probe"] = trainer.state.log_history, trainer.forge.needs_probe, trainer.forge.ready
    # Branches, which transformers would lose; counts of tokens; and all refusals.
    results["saved"] = said(lambda: trainer.save_model(str(root / "with branches")))
    results["pushed"] = said(trainer.push_to_hub)
    results["tokens"] = [counted_tokens(root, *kind) for kind in ((False, True), (True, True), (False, False))]
    results["chosen"] = [chosen_mask(root, factored, least) for factored in (True, False) for least in (0, 40)]
    results["own loader"] = chosen_mask(root, True, 0, with_own_loader())[1]
    results["refused"] = {"deepspeed": without, **dict(refusals(root, trainer))}
    return results


class Lose(TrainerCallback):
    """Makes a weight NaN after the second step, as an update does that is too large."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 2:
            next(more["model"].parameters()).data.view(-1)[0] = torch.nan


def lost(folder: str) -> tuple[str, int]:
    """Return the message, and the hooks that a layer has afterwards."""
    config = deepspeed_json(0)
    trainer = trainer_of(Path(folder), config, 3, callbacks=[Lose()], save_steps=1, save_total_limit=1)
    with pytest.raises(sf.ForgeError) as refused:
        trainer.train()
    return str(refused.value), len(trainer.model.model.layers[0].mlp.up_proj._forward_hooks)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    good = tmp_path / "checkpoint-1"
    message, hooks = run_distributed(lost, 1, str(tmp_path))[0]
    assert hooks == 0, "the next step would have measured"
    assert "are infinite, NaN or beyond their dtype after step 2" in message
    assert f"go back to {good} by resume_from_checkpoint, with a lower learning rate" in message
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


class Stop(TrainerCallback):
    """After the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


def with_own_loader() -> Any:
    """Return a class of trainer whose set alone does not say what its steps read."""
    from sparseforge_ds.integrations.transformers import SparseForgeTrainer

    class WithOwnLoader(SparseForgeTrainer):
        def get_train_dataloader(self) -> Any:
            return super().get_train_dataloader()

    return WithOwnLoader


def chosen_mask(root: Path, factored: bool, least: int, kind: Any = None) -> tuple[bool, int, Tensor]:
    """Choose a mask before the first step by passes over uneven micro-batches, padded to at least so much.

    Return whether all of them were in training mode, how many of them differ, and the mask.
    """
    block = {"method": {"name": "naive_retrain"}, "importance": "fisher", "curvature": {"factored": factored}}
    config = deepspeed_json(1) | {"sparseforge": block}
    more = {"data_collator": partial(padded, least=least), "save_strategy": "no", "callbacks": [Stop()]}
    trainer = trainer_of(root / "chosen", config, 3, kind=kind, **more)
    trainer.model.eval()  # as `from_pretrained` leaves it
    modes: list[bool] = []
    read: set[tuple[int, ...]] = set()

    def watch(model: Any, _positional: Any, inputs: dict[str, Any]) -> None:
        modes.append(model.training)
        read.add(tuple(inputs["input_ids"].flatten().tolist()))

    trainer.model.register_forward_pre_hook(watch, with_kwargs=True)
    trainer.train()
    weights = dict(trainer.model.named_parameters())
    kept = [weights[row["name"]] != 0 for row in trainer.forge.state_dict()["weights"]]
    return all(modes[1:]), len(read), torch.cat([mask.flatten() for mask in kept])


def counted_tokens(root: Path, own_mean: bool, calls_ours: bool = True) -> tuple[list[float], list[float], Tensor]:
    """Return the tokens that steps of 12 and 4 sequences train on, those that the curvature counts, and its sums.

    The sums are those of the first step, with the model's own loss or with a mean over each micro-batch.
    """
    from sparseforge_ds.integrations.transformers import SparseForgeTrainer

    items: list[float] = []

    class Watched(SparseForgeTrainer):
        loss_is_scaled_for_ga = False if own_mean else None

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            samples = super().get_batch_samples(*args, **kwargs)
            items.append(float(samples[1]))
            return samples

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not calls_ours:
                divisor = kwargs["num_items_in_batch"] / self.accelerator.num_processes
                return model(**inputs, num_items_in_batch=divisor).loss
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if not own_mean:
                return loss
            return loss * kwargs["num_items_in_batch"] / 2 / (inputs["labels"][:, 1:] != -100).sum()

    # Note the divisor and the sums of every step's curvature.
    more = {"save_strategy": "no", "num_train_epochs": 3, "train_dataset": rows(16), "kind": Watched}
    if not calls_ours:
        more["data_collator"] = lambda examples: BatchEncoding(padded(examples))  # as those of transformers
    trainer = trainer_of(root / "tokens", deepspeed_json(2), 2, **more)
    counts: list[float] = []
    sums: list[Tensor] = []

    class Counted(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            estimator = trainer.forge.curvature.sums
            finish = type(estimator).finish

            def counting() -> Any:
                finished = finish(estimator)
                counts.append(float(finished[1][0]))
                sums.append(finished[0].values.clone())
                return finished

            estimator.finish = counting

    trainer.add_callback(Counted())
    trainer.train()
    return items[: len(counts)], counts, sums[0]


def test_a_trainer_before_the_mixin_is_refused_where_the_class_is_made() -> None:
    """Its methods would hide those of the mixin."""
    from transformers import Trainer

    from sparseforge_ds.integrations.transformers import SparseForgeMixin

    with pytest.raises(TypeError, match=r"Wrong: SparseForgeMixin must stand before Trainer, as in class Wrong\("):
        type("Wrong", (Trainer, SparseForgeMixin), {})


def test_a_generation_config_is_refused_where_a_save_would_refuse_it(tmp_path: Path) -> None:
    model = tiny_llama()
    model.generation_config.temperature = 0.5
    with pytest.raises(ValueError, match="model.generation_config cannot be saved, and so no checkpoint"):
        refuse_generation_config(model)
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        model.save_pretrained(tmp_path)
    # A published file that contradicts itself is saved as it is.
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    refuse_generation_config(model)
    model.save_pretrained(tmp_path)


class ReadOnce(IterableDataset):
    """A train set whose examples are gone once they are read."""

    def __init__(self) -> None:
        self._examples = iter(rows(12 * STEPS))

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return self

    def __next__(self) -> dict[str, list[int]]:
        return next(self._examples)


def refusals(root: Path, trained: Any) -> Any:
    """Yield (name, message) of each misuse."""
    from sparseforge_ds.integrations.transformers import SparseForgeTrainer

    adapter = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    lora = get_peft_model(tiny_llama(vocab_size=BYTE_VOCABULARY), adapter)
    config = deepspeed_json(2)
    model = str(root)
    args = TrainingArguments(str(root), deepspeed=config, use_cpu=True, report_to="none")
    # Trainers that cannot be made, or trained again.
    yield "again", said(trained.train)
    yield "peft", said(lambda: SparseForgeTrainer(model=lora, args=args))
    optimizers = (torch.optim.SGD(lora.parameters()), None)
    yield "optimizers", said(lambda: SparseForgeTrainer(model=lora, args=args, optimizers=optimizers))
    yield "two losses", said(lambda: trainer_of(root, config, 2, model, compute_loss_func=mean_of_all))
    own_loss = {"compute_loss": lambda self, model, inputs, **_: model(**inputs).loss}
    dense = tiny_llama(vocab_size=BYTE_VOCABULARY)
    hiding = trainer_of(root / "hiding", config, 2, dense, kind=type("Hiding", (SparseForgeTrainer,), own_loss))
    yield "own loss", said(hiding.train)
    untrained = [{**row, "labels": [-100] * len(row["labels"])} for row in rows(12 * STEPS)]
    teacher = tiny_llama(vocab_size=BYTE_VOCABULARY)
    yield "no labels", said(trainer_of(root / "untrained", config, 2, teacher, train_dataset=untrained).train)
    yield "no examples", said(lambda: trainer_of(root, config, 2, model, train_dataset=[]))
    yield "batch", said(lambda: trainer_of(root, config, 2, auto_find_batch_size=True))
    yield "no teacher", said(lambda: trainer_of(root, deepspeed_json(2, distillation={"weight": 1.0}), 2))
    yield "no distillation", said(lambda: trainer_of(root, deepspeed_json(2, distillation=None), 2, model))
    small = tiny_llama(vocab_size=64)
    yield "vocabulary", said(lambda: trainer_of(root, config, 2, small))
    # Teachers that do not fit, and blocks in other forms.
    student = tiny_llama(vocab_size=BYTE_VOCABULARY)
    again = partial(TrainingArguments, str(root), deepspeed=config, use_cpu=True, report_to="none")
    turned = write_model(root / "turned", tiny_llama(vocab_size=BYTE_VOCABULARY))
    (turned / "rotation.json").write_text(json.dumps({"format": 1, "sha256": "another"}))
    hidden = deepspeed_json(2, distillation={"hidden": {}})
    yield "basis", said(lambda: trainer_of(root, hidden, 2, str(turned)))
    # One whose numbers are other tokens, as a folder and as a model that was loaded from it.
    foreign = root / f"foreign {torch.distributed.get_rank()}"
    loaded = tiny_llama(vocab_size=BYTE_VOCABULARY)
    loaded.config._name_or_path = str(foreign)
    loaded.config.save_pretrained(foreign)
    byte_tokenizer().save_pretrained(foreign)
    content = json.loads((foreign / "tokenizer.json").read_text())
    numbers = content["model"]["vocab"]
    content["model"]["vocab"] = dict(zip(numbers, reversed(numbers.values()), strict=True))
    (foreign / "tokenizer.json").write_text(json.dumps(content))
    for name, teacher in (("folder", str(foreign)), ("loaded", loaded)):
        tokenized = partial(SparseForgeTrainer, model=student, args=again(), processing_class=byte_tokenizer())
        yield f"tokens, {name}", said(partial(tokenized, teacher=teacher))
    yield "wrapped", said(lambda: SparseForgeTrainer(model=student, args=again(), teacher=lora))
    yield "itself", said(lambda: SparseForgeTrainer(model=student, args=again(), teacher=student))
    yield "file", said(lambda: SparseForgeTrainer(model=student, args=again(), sparseforge="block.json"))
    pushing = partial(again, deepspeed=deepspeed_json(2, low_rank={"k": 8}), push_to_hub=True)
    offline = type("Offline", (SparseForgeTrainer,), {"init_hf_repo": lambda self, token=None: None})
    with mock.patch.object(TrainingArguments, "world_size", 1):  # as without a GPU and use_cpu
        yield "ranks", said(lambda: SparseForgeTrainer(model=student, args=again()))
    yield "branches", said(lambda: offline(model=student, args=pushing()))
    alone = partial(again, deepspeed=deepspeed_json(2, low_rank={"k": 8}), save_only_model=True)
    yield "branches alone", said(lambda: SparseForgeTrainer(model=student, args=alone()))
    yield "sequences", said(lambda: trainer_of(root, deepspeed_json(2, curvature={"sequences": 8}), 2))
    # Settings that a trainer cannot follow.
    late = SparseForgeConfig(max_steps=9, method=SrSteConfig())
    halves = SimpleNamespace(args=SimpleNamespace(fp16=True))
    yield "fp16", said(lambda: refuse_length(halves, late))
    yield "key", said(lambda: trainer_of(root, deepspeed_json(2, patern="2:4"), 2))
    # Saving: before training, and of tied weights, once.
    fresh = trainer_of(root / "none", config, 2)
    yield "early", said(partial(fresh.save_model, str(root / "early")))
    measured = trainer_of(root / "measured", deepspeed_json(3), 2, eval_dataset=rows(4))
    measured.evaluate()
    yield "evaluated", said(measured.train)
    yield "evaluated first", said(trainer_of(root / "measured", config, 2, eval_dataset=rows(4)).evaluate)
    tied = SparseForgeTrainer(model=tiny_qwen3(vocab_size=BYTE_VOCABULARY), args=again())
    copies = {name: value.clone() for name, value in tied.model.state_dict().items()}  # as accelerate gives them
    tied._save(str(root / f"tied{torch.distributed.get_rank()}"), copies)
    if torch.distributed.get_rank() == 0:  # no other rank writes
        yield "tied", " ".join(load_file(root / "tied0" / "model.safetensors"))
    # Two blocks that differ are a warning; two forms of one block are none.
    warnings: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(trainer_settings.__name__), "warning", warnings.append)
        same = SparseForgeConfig.from_dict(config["sparseforge"])
        SparseForgeTrainer(model=student, args=again(), sparseforge=same)
        assert not warnings, "the same block in another form"
        SparseForgeTrainer(model=student, args=again(), sparseforge={"importance": "magnitude"})
        SparseForgeTrainer(model=student, args=again(deepspeed={**config, "sparseforge": True}), sparseforge=same)
    assert len(warnings) == (2 if torch.distributed.get_rank() == 0 else 0), "a block that is none is another block"
    yield "two blocks", " ".join(warnings)
    # What shows when training begins.
    warnings.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(sharded_weights.__name__), "warning", lambda *args: warnings.append(args))
        for name, rate in (("sound", 3e-3), ("still", 1e-7)):
            trainer_of(root / name, deepspeed_json(2), 2, learning_rate=rate, save_strategy="no").train()
    yield "small steps", " ".join(text % tuple(values) for text, *values in warnings)
    yield "checkpoint", said(partial(fresh.train, resume_from_checkpoint=str(root / "none" / "checkpoint-99")))
    started = deepspeed_json(2, method="naive_retrain", start={})
    stream = trainer_of(root / "once", started, 2, train_dataset=ReadOnce(), max_steps=STEPS)
    yield "read once", said(stream.train)
    lost = trainer_of(root / "lost", deepspeed_json(2), 2)
    lost.model.model.norm.weight.data[3] = torch.nan
    yield "not finite", said(lost.train)
    sampling = trainer_of(root / "sampling", deepspeed_json(2), 2)
    sampling.model.generation_config.temperature = 0.5
    yield "unsaved", said(sampling.train)
    seldom = deepspeed_json(2, method={"update_every": 100})
    yield "length", said(trainer_of(root / "seldom", seldom, 2).train)  # when it was made, its steps were not known
    del config["sparseforge"]
    yield "block", said(lambda: trainer_of(root, config, 2))


def test_evaluation_and_callbacks_work_and_misuse_is_refused(tmp_path: Path) -> None:
    results = run_distributed(evaluated, 2, str(tmp_path))[0]
    checkpoint, step, loss = results["best"]
    # The best checkpoint is one with frozen masks, and it is what is loaded at the end.
    frozen = [i for i, phase in enumerate(results["phases"]) if phase == "frozen"]
    assert len(results["phases"]) == STEPS and frozen[0] == 5
    best = min(frozen, key=lambda i: results["eval"][i])
    assert checkpoint.endswith(f"checkpoint-{best + 1}") and step == best + 1
    assert loss == pytest.approx(results["eval"][best], abs=1e-6)
    weights = sf.Checkpoint(checkpoint)
    masked = weights.client_state["sparseforge"]["weights"]
    assert all((weights.weight(weight["name"]).view(-1, 4) != 0).sum(1).eq(2).all() for weight in masked)
    # Its own loss falls; a curvature of its own passes is logged.
    assert len(results["own"]) == STEPS and results["own"][-1] < results["own"][0]
    logged, needs_probe, ready = results["probe"]
    assert needs_probe and ready and any(metrics.get("curvature/mean", 0) != 0 for metrics in logged)
    # Transformers would lose factors, until they are folded.
    for stage in (2, 3):
        early, logits, exists = results[f"cast{stage}"]
        assert "save_model: transformers would load the model without its factors of outputs" in early and not exists
        for name in ("saved", f"checkpoint-{STEPS}"):
            folder = tmp_path / f"cast{stage}" / name
            if not (folder / "model.safetensors").is_file():  # ZeRO-3 gathers no weights for checkpoints
                continue
            assert not [key for key in load_file(folder / "model.safetensors") if key.endswith("weight_scale")]
            saved = AutoModelForCausalLM.from_pretrained(folder)
            torch.testing.assert_close(saved(input_ids=PROMPT).logits, logits)
        assert main(["verify", str(tmp_path / f"cast{stage}" / "saved")]) == 0
    # Transformers would lose the branches.
    assert "save_model: transformers would load the model without its low-rank branches" in results["saved"]
    assert "push_to_hub: transformers would load the model without its low-rank branches" in results["pushed"]
    assert "push_to_hub: transformers would load the model without its low-rank" in results["refused"]["branches"]
    assert "LlamaForCausalLM: model.norm.weight is not finite in torch.float32" in results["refused"]["not finite"]
    # Padding does not decide a mask that is chosen before the first step.
    for plain, more in (results["chosen"][:2], results["chosen"][2:]):  # by sums and by elements
        assert plain[0] and more[0], "passes before the first step were not in training mode"
        assert plain[1] >= 2 * STEPS, "the probes of a first mask read one step's sequences again and again"
        assert int((plain[2] != more[2]).sum()) <= 2 and plain[2].sum() * 2 == plain[2].numel()
    assert results["own loader"] <= 3, "a loader of one's own makes what a mask is chosen on: the first step's"
    # The curvature counts the tokens that are trained on, and its sums do not depend on how a loss is scaled.
    (items, counts, sums), (_, _, own_sums), (_, own_counts, sums_without_super) = results["tokens"]
    assert len(counts) > 1 and counts == pytest.approx(items), "a step of fewer micro-batches counts for its tokens"
    torch.testing.assert_close(own_sums, sums, rtol=1e-4, atol=0)
    # So does a loss of the class that does not go through ours.
    assert own_counts == counts
    torch.testing.assert_close(sums_without_super, sums, rtol=1e-4, atol=0)
    assert results["alone"]
    # Every misuse is named.
    refused = results["refused"]
    assert "same vocabulary" in refused["vocabulary"] or "vocabulary has" in refused["vocabulary"]
    assert "has its channels in another order or basis" in refused["basis"]
    for name in ("folder", "loaded"):
        assert "foreign 0: 256 of 258 numbers are other tokens in its tokenizer" in refused[f"tokens, {name}"]
    assert "model.generation_config cannot be saved, and so no checkpoint: " in refused["unsaved"]
    assert "teacher is the model that is trained" in refused["itself"]
    assert "teacher is PeftModelForCausalLM, no model of transformers; give a folder" in refused["wrapped"]
    assert "this trainer has an engine already, as evaluate() and predict() make" in refused["evaluated"]
    assert "evaluate() or predict() before train() at ZeRO-2" in refused["evaluated first"]
    assert "give the block itself" in refused["file"]
    assert "curvature.sequences = 8: under a trainer" in refused["sequences"]
    assert "the trainer counts steps that fp16 skips" in refused["fp16"]
    assert "train() was called before" in refused["again"]
    assert 'the "sparseforge" block of the DeepSpeed JSON is not' in refused["two blocks"]
    assert "save_model() before train(): nothing is trained yet" in refused["early"]
    assert "embed_tokens.weight" in refused["tied"] and "lm_head.weight" not in refused["tied"]
    assert "none/checkpoint-99: no such folder; there is none that is whole in" in refused["checkpoint"]
    assert "PEFT adapter" in refused["peft"] and "train it on the sparse model afterwards" in refused["peft"]
    assert "param group of their own" in refused["optimizers"]
    assert "compute_loss_func is another loss" in refused["two losses"]
    assert "save_only_model: transformers would load the model without its low-rank" in refused["branches alone"]
    assert "has started 2 ranks, and TrainingArguments know of one" in refused["ranks"]
    assert "Hiding.compute_loss does not call super().compute_loss, so the teacher" in refused["own loss"]
    assert "nothing is trained on in the first 4 steps, all labels are -100: look at" in refused["no labels"]
    assert "train_dataset has no example" in refused["no examples"]
    assert "auto_find_batch_size" in refused["batch"]
    assert "there is no teacher" in refused["no teacher"]
    assert "sparseforge.distillation is null" in refused["no distillation"]
    assert "patern" in refused["key"]
    assert 'no "sparseforge" block' in refused["block"]
    assert "sparseforge.start reads examples of train_dataset before the first step, and" in refused["read once"]
    assert refused["small steps"].startswith(f"learning rate 1e-07: in {STEPS} steps weights of size "), refused[
        "small steps"
    ]
    assert f"update_every = 100 is not valid: masks are frozen at step 2 of {STEPS}" in refused["length"]
    assert "trains on DeepSpeed" in refused["deepspeed"]


def test_a_checkpoint_to_resume_from_is_there_and_complete(tmp_path: Path) -> None:
    for name in ("checkpoint-3", "checkpoint-6"):
        (tmp_path / name).mkdir()
    for file in ("latest", "trainer_state.json"):
        (tmp_path / "checkpoint-3" / file).write_text("")
    for choice in (None, False, tmp_path / "checkpoint-3", str(tmp_path / "checkpoint-3")):
        assert intact_checkpoint(choice, tmp_path) is choice
    assert intact_checkpoint(True, tmp_path) == str(tmp_path / "checkpoint-3"), "a kill in a save left the last one"
    (tmp_path / "none").mkdir()
    assert intact_checkpoint(True, tmp_path / "none") is True, "the trainer says so itself"
    (tmp_path / "none" / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match="resume_from_checkpoint True: .*checkpoint-1 is not whole, and no other"):
        intact_checkpoint(True, tmp_path / "none")
    cure = f"; the newest that is whole is {tmp_path / 'checkpoint-3'}$"
    for name, why in (("checkpoint-99", "no such folder"), ("checkpoint-6", "is not whole"), ("", "is not whole")):
        with pytest.raises(ValueError, match=f"^resume_from_checkpoint {tmp_path / name}: {why}.*{cure}"):
            intact_checkpoint(str(tmp_path / name), tmp_path / "elsewhere")


def examples(folder: str, commands: dict[str, list[str]]) -> dict[str, Any]:
    """Run the examples as a user does, in this rank; then what `packed` finds."""
    for script, flags in commands.items():
        sys.argv = [script, *flags]
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    return packed(folder)


def packed(folder: str) -> dict[str, Any]:
    """Train by SFTTrainer, with whole documents packed into rows and its own loss; then try what it refuses."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from sparseforge_ds.integrations.transformers import SparseForgeMixin

    class SparseForgeSFTTrainer(SparseForgeMixin, SFTTrainer):
        pass

    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    data = Dataset.from_list([{"text": f"document {i} of {i * i} things"} for i in range(96)])
    results: dict[str, Any] = {}
    # Its own loss, and a teacher at ZeRO-3.
    for stage, teacher in ((1, None), (3, str(Path(folder, "model")))):
        args = SFTConfig(
            str(Path(folder, f"packed{stage}")),
            deepspeed=deepspeed_json(stage),
            use_cpu=True,
            bf16=False,
            report_to="none",
            packing=True,
            max_length=64,
            max_steps=4,
            logging_steps=1,
            per_device_train_batch_size=2,
        )
        more = {"model": tiny_llama(vocab_size=BYTE_VOCABULARY), "args": args, "processing_class": tokenizer}
        trainer = SparseForgeSFTTrainer(train_dataset=data, teacher=teacher, **more)
        trainer.train()
        results[f"{stage}"] = trainer.state.log_history
        if teacher is None:
            results["probe"] = probed(trainer)
    # An adapter.
    try:
        SparseForgeSFTTrainer(train_dataset=data, peft_config=LoraConfig(), **more)
    except ValueError as error:
        results["peft"] = str(error)
    return results


def probed(trainer: Any) -> tuple[float, float, int]:
    """Return the losses that probes take of a packed row, those of its documents alone, and the number of these."""
    from sparseforge_ds.integrations.trainer_batches import StepBatches

    inputs = next(iter(trainer.get_train_dataloader()))
    (begin,) = (inputs["position_ids"][0] == 0).nonzero(as_tuple=True)
    sums = []
    with torch.no_grad():
        text = StepBatches([inputs], trainer._prepare_inputs, Objective(trainer.deepspeed, None, trainer.forge.config))
        (closure,) = text.passes(0)
        together = float(closure()) * text.divisor(0)
        for document in inputs["input_ids"][0].tensor_split(begin[1:].tolist()):
            logits = trainer.model(input_ids=document[None]).logits[0, :-1]
            sums.append(torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum"))
    return together, float(sum(sums)), len(begin)


def test_the_example_trainers_run_and_packed_documents_stay_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = write_model(tmp_path / "model", tiny_llama(vocab_size=BYTE_VOCABULARY))
    lines = [json.dumps({"text": f"What is {i}?\nIt is {i} and no more."}) for i in range(80)]
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(lines))
    # Both examples as their readers start them.
    common = ("--deepspeed", str(ROOT / "examples" / "zero2.json"), "--use_cpu", "--report_to", "none")
    common += ("--max_steps", "6", "--logging_steps", "1", "--per_device_train_batch_size", "2")
    common += ("--model", str(model), "--text", str(text))
    lengths = {"trainer.py": "--length", "sft_trainer.py": "--max_length"}
    commands = {
        script: [*common, flag, "64", "--output_dir", str(tmp_path / script)] for script, flag in lengths.items()
    }
    results = run_distributed(examples, 2, str(tmp_path), commands)[0]
    # What they saved is exported like a run, and their log has the teacher's loss.
    for script in commands:
        out = tmp_path / script
        assert main(["consolidate", "--skip_proof", str(out / "checkpoint-6"), str(tmp_path / f"{script}.out")]) == 0
        assert (tmp_path / f"{script}.out" / "tokenizer.json").is_file()
        history = json.loads((out / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
        assert all("loss/kl" in entry for entry in history if "loss" in entry)
    # Packed rows: its own loss without a teacher, and documents that do not see each other.
    first = results["1"][0]
    assert "mean_token_accuracy" in first and "mask/kept" in first and "loss/kl" not in first
    assert abs(results["3"][0]["loss/kl"]) < 1e-8, "the teacher, the same model still, sees the same documents"
    together, alone, documents = results["probe"]
    assert documents > 2 and together == pytest.approx(alone, rel=1e-6)
    assert "PEFT" in results["peft"]
