"""A block-wise start, on real engines: one result on any ranks and at every ZeRO stage."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparseforge_ds.zero.extra_passes import Closure
from tests import tiny_models
from tests.distributed import run_distributed
from tests.tiny_folders import write_model
from tests.zero.case import (
    GLOBAL_BATCH,
    LENGTH,
    Case,
    batch_at,
    build,
    my_part,
    published,
    states,
    train_step,
)
from tests.zero.test_forge import message_of
from tests.zero.test_trainer import deepspeed_json, losses_of, padded, trainer_of

BATCHES = 6
START = {"tokens": BATCHES * GLOBAL_BATCH * LENGTH, "epochs": 3, "rate": 0.02, "soft": 0}
BLOCK = {"max_steps": 4, "exclude": ["*.down_proj.weight"], "start": START, "method": {"hardening": [0, 0]}}
CASE = Case(model="llama_deep", config=BLOCK, steps=4)
FLIPS = 0.01
"""Share of the members of all groups that may be decided otherwise on other ranks: gradients are added in another order
there, and the second block is chosen for by what the first one was trained to."""


@dataclass(frozen=True)
class Text:
    """Another global micro-batch for every probe batch."""

    engine: Any

    def passes(self, batch: int) -> list[Closure]:
        return [partial(self._loss, batch)]

    def _loss(self, number: int) -> Tensor:
        loss: Tensor = self.engine(**my_part(batch_at(number))).loss
        return loss


def started(case: Case) -> dict[str, Any]:
    """Masks, W and what the forward sees after the start, and masks and W at the end of four steps."""
    engine, forge = build(case)
    dense = published(engine)
    forge.start(Text(engine))
    record = {**states(forge, "mask", "dense"), "before": dense, "published": published(engine), "losses": []}
    for step in range(case.steps):
        record["losses"].append(train_step(engine, case, step))
        forge.step()
    forge.finish()
    return record | {"end": states(forge, "mask", "dense")}


def start_all(cases: list[Case]) -> list[dict[str, Any]]:
    records = [started(case) for case in cases]
    return records if dist.get_rank() == 0 else []


def moving(case: Case) -> Case:
    """Return the case with masks that move for two steps after the start."""
    block = {"method": {"hardening": [0, 0.5], "update_every": 1}, "curvature": {"source": "training"}}
    return replace(case, config=case.config | block)


def soft(case: Case) -> Case:
    """Return the case with masks that move inside the blocks."""
    return replace(case, config=case.config | {"start": {**START, "soft": 0.4}})


LAUNCHES: dict[int, dict[str, Case]] = {
    1: {"stage 0": CASE, "stage 3": replace(CASE, stage=3), "soft": soft(CASE), "moving": moving(CASE)},
    2: {
        **{f"stage {stage}": replace(CASE, stage=stage) for stage in range(4)},
        "soft": soft(replace(CASE, stage=3)),
        "moving": moving(CASE),
        "moving, stage 3": moving(replace(CASE, stage=3)),
        "bf16": replace(CASE, stage=1, dtype="bf16"),
    },
    3: {"stage 1": replace(CASE, stage=1), "stage 3": replace(CASE, stage=3)},
}
"""Cases by number of ranks."""


@pytest.fixture(scope="module")
def records() -> dict[tuple[int, str], dict[str, Any]]:
    """Return records by number of ranks and case."""
    results = {}
    for ranks, cases in LAUNCHES.items():
        for name, record in zip(cases, run_distributed(start_all, ranks, [*cases.values()])[0], strict=True):
            results[ranks, name] = record
    return results


def started_opt(freezes: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return parameters before and after the start of a model whose norms and biases are frozen, or none is."""
    model = tiny_models.tiny_opt(vocab_size=40)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() > 1 or not freezes)
    engine, forge = build(replace(CASE, stage=3, config={"max_steps": 4, "start": START}), model)
    before = published(engine)
    forge.start(Text(engine))
    return before, published(engine)


def start_opts() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [started_opt(True), started_opt(False)]


def test_frozen_norms_and_biases_stay_and_weights_are_trained_beside_them() -> None:
    (before, frozen), (_, moved) = run_distributed(start_opts, 2)[0]
    vectors = {name for name, value in before.items() if value.dim() == 1}
    assert all(torch.equal(frozen[name], before[name]) for name in vectors)
    assert any(not torch.equal(frozen[name], before[name]) for name in before.keys() - vectors)
    assert any(not torch.equal(moved[name], before[name]) for name in vectors if name.endswith("bias"))


def test_masks_are_the_same_at_every_stage_and_but_for_ties_on_any_number_of_ranks(records) -> None:
    for (ranks, name), record in records.items():
        if name == "bf16" or name.startswith("moving"):
            continue
        alone = records[1, "soft" if name == "soft" else "stage 0"]
        first = record if name == "soft" else records[ranks, "stage 0" if ranks < 3 else "stage 1"]
        flipped = total = 0
        for weight, mask in alone["mask"].items():
            assert torch.equal(record["mask"][weight], first["mask"][weight]), (ranks, name, weight)
            assert torch.equal(record["dense"][weight], first["dense"][weight]), (ranks, name, weight)
            flipped += int((record["mask"][weight] != mask).sum())
            total += mask.numel()
        assert flipped <= FLIPS * total, (ranks, name, flipped, total)
        apart = [abs(actual - reference) for actual, reference in zip(record["losses"], alone["losses"], strict=True)]
        assert max(apart) < 2e-3, (ranks, name, apart)


def test_the_start_leaves_sparse_blocks_with_trained_norms_that_stay_sparse(records) -> None:
    for where, record in records.items():
        if where[1].startswith("moving"):
            continue
        for weight, mask in record["mask"].items():
            assert (mask.view(-1, 4).sum(1) == 2).all(), (where, weight)
            assert torch.equal(mask, record["end"]["mask"][weight]), (where, weight)
            kept = record["end"]["dense"][weight] * mask
            assert torch.equal(kept, record["end"]["dense"][weight]) and kept.any(), (where, weight)
            published_weights = record["published"][weight].float().flatten()
            assert torch.equal(published_weights != 0, mask != 0), (where, weight)
        moved = {name for name, value in record["published"].items() if not torch.equal(value, record["before"][name])}
        assert moved == {*record["mask"], *(n for n in record["before"] if "layers" in n and "norm" in n)}, where


def test_masks_that_move_after_a_start_grow_from_what_it_left(records) -> None:
    fixed = records[1, "stage 0"]
    for where in ((1, "moving"), (2, "moving"), (2, "moving, stage 3")):
        record = records[where]
        for weight, mask in record["mask"].items():
            published_weights = record["published"][weight].float()
            assert (mask == 1).all() and torch.equal(published_weights.flatten(), record["dense"][weight].flatten()), (
                where,
                weight,
            )
            assert ((published_weights.view(-1, 4) != 0).sum(1) == 2).all(), (where, weight)
            end = record["end"]["mask"][weight]
            assert (end.view(-1, 4).sum(1) == 2).all(), (where, weight)
        assert torch.equal(record["end"]["mask"][weight], records[2, "moving"]["end"]["mask"][weight]) or where[0] == 1
    # Where nothing was added in another order, the start is that of fixed masks.
    for weight, mask in fixed["mask"].items():
        assert torch.equal(records[1, "moving"]["dense"][weight].flatten() != 0, mask.flatten() != 0), weight


def resumed_behind_the_start(folder: str) -> bool:
    """Return True if a run that is resumed from the checkpoint behind its start ends like the run itself."""
    return all(_ends_alike(Path(folder, model), model) for model in ("llama_deep", "qwen3_moe"))


def _ends_alike(folder: Path, model: str) -> bool:
    mixture = {"start": {**START, "soft": 0.4}, "exclude": []} if model == "qwen3_moe" else {}
    case = moving(Case(model=model, stage=3, config=BLOCK | mixture, steps=4))
    ends = []
    for resumes in (False, True):
        engine, forge = build(case)
        if resumes:
            engine.load_checkpoint(str(folder), tag="start")
        else:
            forge.start(Text(engine))
            engine.save_checkpoint(str(folder), tag="start")
        for step in range(case.steps):
            train_step(engine, case, step)
            forge.step()
        forge.finish()
        ends.append(states(forge, "mask", "dense"))
    run, resumed = ends
    return all(torch.equal(run[key][name], resumed[key][name]) for key in run for name in run[key])


def test_a_start_is_not_made_again_where_masks_move_after_it(tmp_path: Path) -> None:
    assert run_distributed(resumed_behind_the_start, 2, str(tmp_path)) == [True, True]


FIXED = {"max_steps": 2, "method": {"hardening": [0, 0]}, "start": START}
SOFT_INSIDE = {**FIXED, "start": {**START, "soft": 0.4}}
OTHERS = {
    "inputs first": Case(model="gpt2", stage=1, config=FIXED),
    "branches": Case(stage=2, config={**FIXED, "low_rank": {"k": 4}}),
    "fp16": Case(stage=1, dtype="fp16", config=FIXED),
    "fused experts": Case(model="qwen3_moe", stage=3, config=SOFT_INSIDE),
    "experts that see all": Case(model="llama4", stage=1, config=SOFT_INSIDE),
}


def started_others() -> dict[str, bool]:
    """Return whether every group of every weight has two members behind the start, and a step can be made."""
    results = {}
    for name, case in OTHERS.items():
        engine, forge = build(case)
        forge.start(Text(engine))
        masks = states(forge, "mask")["mask"]
        groups = [forge.pattern.to_groups(masks[w.name], w.shape, w.input_axis) for w in forge.weights]
        results[name] = all(bool((group_GM.sum(1) == 2).all()) for group_GM in groups)
        results[name] &= torch.tensor(train_step(engine, case, 0)).isfinite().item() and forge.step() is False
    # A block without experts gets the kind of first mask that the others must have.
    masks_by_kind = []
    for kind in (None, "wanda"):
        case = Case(model="qwen3_moe", stage=2, config={**FIXED, "start": {**START, "epochs": 0, "mask": kind}})
        engine, forge = build(case)
        forge.start(Text(engine))
        masks_by_kind.append(states(forge, "mask")["mask"])
    default, wanda = masks_by_kind
    results["one kind of mask"] = "model.layers.0.mlp.up_proj.weight" in default
    results["one kind of mask"] &= all(torch.equal(default[name], wanda[name]) for name in wanda)
    return results


def test_other_layers_dtypes_and_branches_start_alike() -> None:
    for result in run_distributed(started_others, 2):
        assert result == dict.fromkeys([*OTHERS, "one kind of mask"], True)


def refused() -> dict[str, str]:
    """Messages of starts that cannot be."""
    messages = {}
    engine, forge = build(CASE)
    messages["no text"] = message_of(lambda: forge.start(None))

    @dataclass(frozen=True)
    class Uneven(Text):
        def passes(self, batch: int) -> list[Closure]:
            return super().passes(batch) * (1 + batch * dist.get_rank())  # on one rank alone

    messages["function"] = message_of(lambda: forge.start(Text(engine).passes(0)[0]))
    uneven = Uneven(engine)
    object.__setattr__(uneven, "epochs", 1)
    messages["uneven"] = message_of(lambda: forge.start(uneven))
    # A probe that is mended is taken, as if it had been the first.
    engines = [(engine, forge), build(CASE)]
    for engine, forge in engines:
        forge.start(Text(engine))
    again, fresh = (states(forge, "mask", "dense") for _, forge in engines)
    same = all(torch.equal(value, fresh[key][name]) for key in fresh for name, value in again[key].items())
    messages["again"] = "as fresh" if same else "unlike"
    engine, forge = build(CASE)
    engine.module.model.layers[1].register_forward_pre_hook(lambda _module, args: (2 * args[0], *args[1:]))
    messages["no chain"] = message_of(lambda: forge.start(Text(engine)))
    engine, forge = build(CASE)
    engine.module.model.layers[1].register_forward_hook(lambda _module, _args, output: 2 * output)
    messages["not alone"] = message_of(lambda: forge.start(Text(engine)))
    # Every handover is compared, not the first alone.
    engine, forge = build(CASE, tiny_models.tiny_llama(vocab_size=40, num_hidden_layers=3))
    engine.module.model.layers[2].register_forward_pre_hook(lambda _module, args: (2 * args[0], *args[1:]))
    messages["no chain later"] = message_of(lambda: forge.start(Text(engine)))
    return messages


def test_starts_that_cannot_work_are_refused_on_all_ranks() -> None:
    for messages in run_distributed(refused, 2):
        assert "sparseforge.start needs calibration batches: call forge.start(probe)" in messages["no text"], messages
        assert "would train every block on the one micro-batch of a function" in messages["function"], messages
        assert "1 micro-batches at first and 2 in batch 1; give as many in every one" in messages["uneven"], messages
        assert messages["again"] == "as fresh"
        for case in ("no chain", "no chain later"):
            assert "does not hand its hidden states from block to block as they are" in messages[case], messages
        assert "model.layers.1 computes something else alone than in its model" in messages["not alone"], messages


class Lines(logging.Handler):
    """Handler that keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


def in_a_trainer(folder: str, batch: int | None) -> tuple[dict[str, Tensor], list[float]]:
    """Weights at the end and losses, where the start reads sequences of uneven lengths."""
    block = {"start": {"tokens": 400, "epochs": 1, "batch": batch}}
    read: list[list[int]] = []

    def collate(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        read.append([len(example["input_ids"]) for example in examples])
        return padded(examples)

    config = deepspeed_json(1) | {"sparseforge": block}
    more = {"data_collator": collate, "save_strategy": "no", "max_steps": 2}
    trainer = trainer_of(Path(folder, "out"), config, 2, **more)
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    lines = Lines()
    logging.getLogger("sparseforge_ds").addHandler(lines)
    logging.getLogger("sparseforge_ds").setLevel(logging.INFO)
    trainer.train()
    # Without a batch, one rank would take a sequence a step: two take two, and so twice as many passes.
    assert any(f"{3 if batch else 2 * 14} steps of each of 2 blocks" in line for line in lines.records), (
        batch,
        lines.records,
    )
    rank = dist.get_rank()
    size = 2 if batch == 8 else 1
    first = [lengths[2 * size * n + size * rank :][:size] for n in range(4)]
    # The first one that is read says how long sequences are.
    peeked = lengths[2 * rank : 2 * rank + 2]
    assert read[read.index(peeked) :][:5] == [peeked, *first], (first, read)
    weights = dict(trainer.model.named_parameters())
    masked = {row["name"]: weights[row["name"]].detach() for row in trainer.forge.state_dict()["weights"]}
    return masked, losses_of(trainer)


def test_a_trainer_begins_from_the_first_examples_of_its_set(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    # Two micro-batches a step, or one of a single sequence: 400 tokens have fewer than 512 steps.
    of_both = [result for batch in (8, None) for result in run_distributed(in_a_trainer, 2, str(tmp_path), batch)]
    for masked, losses in of_both:
        assert len(losses) == 2 and all(torch.tensor(losses).isfinite())
        for name, value in masked.items():
            assert ((value.reshape(-1, 4) != 0).sum(1) == 2).all(), name
