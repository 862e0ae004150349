"""A run saved on any ranks at any ZeRO stage goes on at any other: what it holds is equal, and where it goes too.

Sixteen runs, one for each stage on each number of ranks, each continued in two other layouts; every layout is the
target of two. Dtype, offload, low-rank branches, frozen weights and the odd settings are spread over them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseforge_ds.checkpoint.reader import Checkpoint
from tests.distributed import run_distributed
from tests.zero.case import MODELS, Case, added_up, build, gathered, probe_of, states, train_step

# What other sums of gradients make of up to 9 steps. In fp32, 6e-8 was seen in masks and in weights: no target moved.
FP32_MASK, FP32_DENSE = 1e-6, 1e-6
# In 16 bits a near tie may fall the other way: 0.3 % of the mask entries, and 2.3e-4 in the mean weight, were seen.
LOW_SHARE, LOW_DENSE = 1e-2, 1e-3
# fp16 at stage 0 has no loss scale, and loses small gradients.
UNSCALED_DENSE = 5e-3
STEPS = 10
LOW_RANK = {"low_rank": {"k": 4}}
LEARNED = {"low_rank": {"k": 4, "learned": True}}
PUBLISHED_START = {"low_rank": {**LOW_RANK["low_rank"], "shift": False}}
RAGGED = {"exclude": ["*.k_proj.weight"]}  # so that shards cut groups
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
TORCH_ADAM = {"zero_force_ds_cpu_optimizer": False}
NOTHING_PERSISTENT = {"stage3_param_persistence_threshold": 0}
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
BF16_MASTERS = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
DYNAMIC_SCALE = {"fp16": {"initial_scale_power": 6, "loss_scale_window": 2}}


@dataclass(frozen=True)
class Saved:
    """A run that is saved once, on `ranks` ranks."""

    ranks: int
    case: Case
    save: int = 3
    """Updates are at 2, 4 and 6, hardening from 3 to 7, frozen from then on."""


SAVED: dict[str, Saved] = {
    "0 on 1": Saved(1, Case(stage=0)),
    "1 on 1": Saved(1, Case(stage=1, dtype="bf16", zero=OFFLOAD, more=TORCH_ADAM, config=RAGGED)),
    "2 on 1": Saved(1, Case(stage=2, model="gpt2", gas=2, clip=0.1), save=8),
    "3 on 1": Saved(1, Case(stage=3, config=LEARNED, zero={"sub_group_size": 300}), save=7),
    "0 on 2": Saved(2, Case(stage=0, dtype="bf16", config=RAGGED)),
    "1 on 2": Saved(2, Case(stage=1, config={**RAGGED, "importance": "wanda"}), save=3),
    "2 on 2": Saved(2, Case(stage=2, dtype="fp16", more=DYNAMIC_SCALE, config=RAGGED)),
    "3 on 2": Saved(2, Case(stage=3, zero={**OFFLOAD, **NOTHING_PERSISTENT}, more=TORCH_ADAM)),
    "0 on 3": Saved(3, Case(stage=0, model="gpt2", config=PUBLISHED_START), save=2),  # branches have no moments yet
    "1 on 3": Saved(3, Case(stage=1, dtype="fp16", more=DYNAMIC_SCALE)),
    "2 on 3": Saved(
        3, Case(stage=2, config=LOW_RANK, zero={**OFFLOAD, "round_robin_gradients": True}, more=TORCH_ADAM)
    ),
    "3 on 3": Saved(3, Case(stage=3, dtype="bf16", config=RAGGED, more=BF16_MASTERS), save=6),
    "0 on 4": Saved(4, Case(stage=0, client=True, config={**RAGGED, "importance": "magnitude"}), save=1),
    "1 on 4": Saved(4, Case(stage=1, dtype="bf16", more=FP32_GRADIENTS)),
    "2 on 4": Saved(4, Case(stage=2, dtype="bf16", more=BF16_MASTERS, config=LEARNED), save=4),
    "3 on 4": Saved(4, Case(stage=3, config=RAGGED, zero=NOTHING_PERSISTENT), save=9),
}


def there(name: str, shift: int) -> tuple[int, int]:
    """Return the stage and the number of ranks that a run is continued with."""
    stage = int(name[0])
    ranks = int(name[-1])
    if shift == 1:
        return (stage + 1) % 4, ranks % 4 + 1
    return (stage + 2) % 4, (ranks + 1) % 4 + 1


PAIRS = [(name, *there(name, shift)) for name in SAVED for shift in (1, 2)]


def target(name: str, stage: int) -> Case:
    """Return the case of a run at another stage, with the opposite offload, without what that stage cannot do."""
    case = SAVED[name].case
    impossible = {"data_types"}
    impossible |= {"fp16"} if stage == 0 else set()  # no dynamic scale there
    impossible |= {"bf16"} if stage < 2 else set()  # no masters in bf16 there
    more = {key: value for key, value in case.more.items() if key not in impossible}
    zero: dict[str, Any] = {}
    if stage > 0 and "offload_optimizer" not in case.zero and "bf16" not in more:
        zero |= OFFLOAD
    if stage == 3:
        zero |= {"sub_group_size": 500} if SAVED[name].ranks % 2 else NOTHING_PERSISTENT
    return replace(case, stage=stage, zero=zero, more={**more, **TORCH_ADAM})


def model_of(case: Case, fresh: bool) -> Any:
    """Return the case's model with a frozen weight and a buffer; `fresh`: as something else would have left it."""
    model = MODELS[case.model]()
    frozen = model.transformer.ln_f.weight if case.model == "gpt2" else model.model.embed_tokens.weight
    frozen.requires_grad_(False)
    model.register_buffer("counted", torch.tensor([1.5, 2.5]))
    if fresh:
        with torch.no_grad():
            for value in (*model.parameters(), model.counted):
                value.mul_(1.25)
    return model


def everything(engine: Any, forge: Any) -> dict[str, Tensor]:
    """Masters, frozen weights, buffers and every optimizer state by name, whole. Collective."""
    import deepspeed

    layout = forge.sharded.layout
    results: dict[str, Tensor] = {"buffer counted": engine.module.counted.clone()}
    pieces: dict[str, Tensor] = {}
    for name, shard in layout.shards.items():
        flat = layout.flats[shard.flat]
        parts = {"master": flat.detach()}
        for key, value in layout.inner.state.get(flat, {}).items():
            if torch.is_tensor(value) and value.dim():
                parts[key] = value
            else:
                results[f"{key} {name}"] = torch.tensor(float(value))
        for key, value in parts.items():
            full = torch.zeros(torch.Size(shard.shape).numel(), device=layout.device)
            full[shard.start : shard.stop] = shard.slice_of_flat(value)
            pieces[f"{key} {name}"] = full
    results |= added_up(pieces, layout.replicated)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        results |= {f"weight {name}": value.detach().clone() for name, value in engine.module.named_parameters()}
    return results


def scaler_of(engine: Any) -> Any:
    if engine.loss_scale() is None or not hasattr(getattr(engine.optimizer, "loss_scaler", None), "cur_hysteresis"):
        return None
    scaler = engine.optimizer.loss_scaler
    return scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis


def go_on(engine: Any, forge: Any, case: Case, first: int, last: int) -> dict[int, dict[str, dict[str, Tensor]]]:
    """Train; masks and dense weights after each step."""
    records = {}
    for step in range(first, last):
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))
        records[step + 1] = states(forge, "mask", "dense")
    return records


def record(engine: Any, forge: Any) -> dict[str, Any]:
    """Return what must be the same in another layout right after the change."""
    return {
        "everything": everything(engine, forge),
        "scaler": scaler_of(engine),
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps),
        "forge": (forge.step_count, forge.curvature.refreshes),
        "lr": [group["lr"] for group in engine.basic_optimizer.param_groups],
        "decay": [group["weight_decay"] for group in engine.basic_optimizer.param_groups],
    }


def unbroken(names: list[str], folder: str) -> dict[str, Any]:
    """Save each run on its way; what it held then, and where it went."""
    result = {}
    for name in names:
        saved = SAVED[name]
        engine, forge = build(saved.case, model_of(saved.case, fresh=False))
        for number, group in enumerate(engine.basic_optimizer.param_groups):
            group["lr"] *= 1 + number / 8  # a schedule may have moved them
        forge.start(probe_of(engine, saved.case, 0))
        go_on(engine, forge, saved.case, 0, saved.save)
        engine.save_checkpoint(folder, tag=name)
        at_save = record(engine, forge)
        result[name] = {"at save": at_save, "later": go_on(engine, forge, saved.case, saved.save, STEPS)}
    return result


def moved(pairs: list[tuple[str, int]], folder: str) -> dict[tuple[str, int], Any]:
    """Continue each run at its new stage on these ranks."""
    result = {}
    for name, stage in pairs:
        case = target(name, stage)
        engine, forge = build(case, model_of(case, fresh=True))
        forge.restore(Checkpoint(Path(folder, name)))
        # Removing the checkpoint would free its room on the disk: nothing of it stays mapped.
        assert str(Path(folder, name)) not in Path("/proc/self/maps").read_text()
        restored = record(engine, forge)
        later = go_on(engine, forge, case, SAVED[name].save, STEPS)
        forge.finish()
        result[name, stage] = {"restored": restored, "later": later}
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    results: dict[str, Any] = {}
    for ranks in (1, 2, 3, 4):
        names = [name for name, saved in SAVED.items() if saved.ranks == ranks]
        results |= run_distributed(unbroken, ranks, names, str(folder))[0]
    return folder, results


@pytest.fixture(scope="module")
def continued(runs: tuple[Path, dict[str, Any]]) -> dict[tuple[str, int], Any]:
    results: dict[tuple[str, int], Any] = {}
    for ranks in (1, 2, 3, 4):
        pairs = [(name, stage) for name, stage, at in PAIRS if at == ranks]
        results |= run_distributed(moved, ranks, pairs, str(runs[0]))[0]
    return results


def test_every_layout_is_a_source_and_a_target() -> None:
    layouts = {(stage, ranks) for stage in range(4) for ranks in range(1, 5)}
    assert {(case.case.stage, case.ranks) for case in SAVED.values()} == layouts
    assert {(stage, ranks) for _, stage, ranks in PAIRS} == layouts
    assert all((SAVED[name].case.stage, SAVED[name].ranks) != (stage, ranks) for name, stage, ranks in PAIRS)


@pytest.mark.parametrize(("name", "stage", "ranks"), PAIRS)
def test_a_restored_engine_holds_what_was_saved(runs: Any, continued: Any, name: str, stage: int, ranks: int) -> None:
    saved = runs[1][name]["at save"]
    restored = continued[name, stage]["restored"]
    assert saved["everything"].keys() == restored["everything"].keys()
    unequal = [key for key, value in saved["everything"].items() if not torch.equal(value, restored["everything"][key])]
    assert not unequal
    for key in ("counters", "forge", "lr", "decay"):
        assert restored[key] == saved[key], key
    if not (name == "2 on 2" and stage == 0):  # there is no dynamic loss scale at stage 0
        assert restored["scaler"] == saved["scaler"]
    assert (saved["scaler"] is not None) == (SAVED[name].case.dtype == "fp16")


@pytest.mark.parametrize(("name", "stage", "ranks"), PAIRS)
def test_a_restored_run_ends_where_the_unbroken_one_does(
    runs: Any, continued: Any, name: str, stage: int, ranks: int
) -> None:
    expected = runs[1][name]["later"]
    result = continued[name, stage]["later"]
    assert expected.keys() == result.keys() == set(range(SAVED[name].save + 1, STEPS + 1))
    apart: dict[str, list[Tensor]] = {"mask": [], "dense": []}
    for step, target in expected.items():
        for key, values in target.items():
            apart[key] += [(result[step][key][weight] - value).abs() for weight, value in values.items()]
    mask, dense = (torch.cat(apart[key]) for key in ("mask", "dense"))
    if SAVED[name].case.dtype == "fp32":
        assert mask.max() < FP32_MASK and dense.max() < FP32_DENSE, (mask.max(), dense.max())
    else:
        bound = UNSCALED_DENSE if (name, stage) == ("2 on 2", 0) else LOW_DENSE
        assert (mask > FP32_MASK).float().mean() < LOW_SHARE and dense.mean() < bound, (mask.mean(), dense.mean())


def misfits(folder: str) -> dict[str, str]:
    """Return the messages about checkpoints that do not fit, on every rank, and whether they change anything."""
    saved = SAVED["2 on 3"].case
    results = {}

    # Restore into a fresh engine; a refusal must leave it as it was.
    def refusal(case: Case, name: str, change: Any = None) -> str:
        model = model_of(case, fresh=True)
        if change is not None:
            change(model)
        engine, forge = build(case, model)
        before = everything(engine, forge)
        try:
            forge.restore(Checkpoint(Path(folder, name)))
        except ValueError as error:
            after = everything(engine, forge)
            unchanged = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
            return str(error) if unchanged else f"changed the engine, then: {error}"
        return "accepted"

    def train_everything(model: Any) -> None:
        model.requires_grad_(True)

    def freeze_norms(model: Any) -> None:
        model.model.norm.weight.requires_grad_(False)

    def grow_the_buffer(model: Any) -> None:
        model.counted = torch.zeros(3)

    # Runs that differ from the saved one in one thing each.
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "zero_allow_untested_optimizer": True}
    plain = replace(saved, zero={}, more={})
    results["pattern"] = refusal(replace(plain, config={**LOW_RANK, "pattern": "1:4"}), "2 on 3")
    results["thawed"] = refusal(plain, "2 on 3", train_everything)
    results["frozen"] = refusal(plain, "2 on 3", freeze_norms)
    results["buffer"] = refusal(plain, "2 on 3", grow_the_buffer)
    results["optimizer"] = refusal(replace(plain, more=sgd), "2 on 3")
    amsgrad = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "amsgrad": True}}}
    results["amsgrad"] = refusal(replace(plain, more=amsgrad), "2 on 3")
    results["scheduler"] = refusal(
        replace(plain, more={"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}), "2 on 3"
    )
    results["damaged"] = refusal(plain, "damaged")
    results["same"] = refusal(plain, "2 on 3")
    return results


def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(runs: Any) -> None:
    folder = runs[0]
    shutil.copytree(folder / "2 on 3", folder / "damaged")
    # Flip a bit of one master, in the file of one rank.
    masters = Checkpoint(folder / "2 on 3").slice("model.layers.0.mlp.up_proj.weight", None, 556, 560)  # of rank 1
    needle = masters.numpy().tobytes()
    damaged = 0
    for file in sorted((folder / "damaged").glob("*_optim_states.pt")):
        content = file.read_bytes()
        if (at := content.find(needle)) >= 0:
            file.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
            damaged += 1
    assert damaged == 1
    ranks = run_distributed(misfits, 2, str(folder))
    assert ranks[0] == ranks[1]  # also where one rank alone has read the damage
    # Each message names the checkpoint and what differs.
    messages = ranks[0]
    where = str(folder / "2 on 3")
    for key, text in {
        "pattern": 'sparseforge.pattern was "2:4", is "1:4"',
        "thawed": "model.embed_tokens.weight, which is trained here",
        "frozen": "model.norm.weight was trained in the saved run and is frozen here",
        "buffer": "counted is (3,) in this model, (2,) in the checkpoint",
        "optimizer": "another kind of optimizer",
        "amsgrad": "was saved with amsgrad = False, unlike this run",
        "scheduler": "without an lr scheduler in the engine, this engine has WarmupLR",
    }.items():
        assert messages[key].startswith(where) and text in messages[key], messages[key]
    assert str(folder / "damaged") in messages["damaged"] and "up_proj.weight is not what" in messages["damaged"]
    assert messages["same"] == "accepted"


def counted(folder: str) -> dict[str, int]:
    """Count the elements of weights and of their moments that this rank reads."""
    case = target("3 on 4", 2)
    engine, forge = build(case, model_of(case, fresh=True))
    checkpoint = Checkpoint(Path(folder, "3 on 4"))
    read = dict.fromkeys(["exp_avg_sq", "exp_avg", "master"], 0)
    plain = checkpoint.slice

    def count(name: str, key: str | None, start: int, stop: int) -> Tensor:
        if key in read or (key is None and name in forge.sharded.layout.shards):
            read[key or "master"] += stop - start
        return plain(name, key, start, stop)

    checkpoint.slice = count  # type: ignore[method-assign]
    forge.restore(checkpoint)
    return read


def test_a_rank_reads_its_share_once(runs: Any) -> None:
    ranks = run_distributed(counted, 3, str(runs[0]))
    checkpoint = Checkpoint(runs[0] / "3 on 4")
    for key in ("exp_avg", "exp_avg_sq"):
        total = sum(checkpoint.state(name, key).numel() for name in checkpoint.shapes if key in checkpoint.states(name))
        assert sum(read[key] for read in ranks) == total
        assert max(read[key] for read in ranks) < total / 2
    assert sum(read["master"] for read in ranks) == sum(read["exp_avg"] for read in ranks)


BEFORE = {
    "stage 2, 1:4 at once": Case(stage=2, config={**RAGGED, "method": {"hardening": [0.0, 0.0]}}),
    "stage 0, bf16": Case(stage=0, dtype="bf16"),
    "stage 2, bf16 masters, fixed": Case(
        stage=2, dtype="bf16", more=BF16_MASTERS, config={"method": "naive_retrain", "importance": "magnitude"}
    ),
    "stage 3": Case(stage=3, client=True),
}


def before_the_first_step(folder: str) -> dict[str, tuple[bool, float]]:
    """Return whether a run saved before its first step starts anew, and how far it then goes astray."""
    results = {}
    for name, case in BEFORE.items():
        engine, forge = build(case, model_of(case, fresh=False))
        engine.save_checkpoint(folder, tag=name)
        forge.start(probe_of(engine, case, 0))
        expected = go_on(engine, forge, case, 0, 4)
        other = replace(case, stage=(case.stage + 1) % 4)
        engine, forge = build(other, model_of(other, fresh=True))
        forge.restore(Checkpoint(Path(folder, name)))
        begun = forge.step_count > 0 or any("dense" in state for state in engine.basic_optimizer.state.values())
        forge.start(probe_of(engine, other, 0))
        records = go_on(engine, forge, other, 0, 4)
        dense, kept = records[4]["dense"], expected[4]["dense"]
        results[name] = (begun, max((dense[weight] - value).abs().mean().item() for weight, value in kept.items()))
    return results


def test_a_run_saved_before_its_first_step_is_restored(tmp_path: Path) -> None:
    for name, (begun, apart) in run_distributed(before_the_first_step, 2, str(tmp_path))[0].items():
        assert not begun
        assert apart < (LOW_DENSE if BEFORE[name].dtype == "bf16" else FP32_DENSE), name


def behind_a_fixed_start(folder: str) -> list[bool]:
    """Return whether a run saved behind its start, masters in fp32, keeps its masks where masters have 16 bits."""
    case = Case(stage=2, dtype="bf16", config={"method": "naive_retrain", "importance": "magnitude"})
    engine, forge = build(case, model_of(case, fresh=False))
    forge.start(probe_of(engine, case, 0))
    engine.save_checkpoint(folder, tag="start")
    masks, dense = gathered(forge, "mask"), gathered(forge, "dense")
    other = replace(case, stage=3, more=BF16_MASTERS)
    engine, forge = build(other, model_of(other, fresh=True))
    engine.load_checkpoint(folder, tag="start")
    loaded = gathered(forge, "dense")
    go_on(engine, forge, other, 0, 2)
    ended = gathered(forge, "mask")
    moments = [key for state in engine.basic_optimizer.state.values() for key in state if key == "exp_avg"]
    return [
        all(torch.equal(loaded[name], value) for name, value in dense.items()),
        all(torch.equal(ended[name], value) for name, value in masks.items()),
        len(moments) == len(forge.sharded.layout.flats),
    ]


def test_a_fixed_start_goes_on_with_masters_of_16_bits(tmp_path: Path) -> None:
    assert run_distributed(behind_a_fixed_start, 2, str(tmp_path)) == [[True] * 3] * 2


OWN: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
OPTIMIZERS: dict[str, tuple[str, Case]] = {
    "fused, a master each": ("FusedAdam", Case(stage=0, more=OWN)),
    "offloaded": ("DeepSpeedCPUAdam", Case(stage=3, zero={**OFFLOAD, "sub_group_size": 300}, more=OWN)),
    "torch": ("AdamW", Case(stage=2, lr=3e-3)),
}


def own_optimizers(folder: str) -> dict[tuple[str, str], float]:
    """Return how far a run goes astray in one step when another AdamW continues it, and its step counts."""
    results = {}
    for before, (kind, case) in OPTIMIZERS.items():
        engine, forge = build(case)
        assert type(engine.basic_optimizer).__name__ == kind
        go_on(engine, forge, case, 0, 5)
        engine.save_checkpoint(folder, tag=before)
        expected = go_on(engine, forge, case, 5, 6)[6]["dense"]
        for after, (_, other) in OPTIMIZERS.items():
            engine, forge = build(other)
            forge.restore(Checkpoint(Path(folder, before)))
            states = engine.basic_optimizer.state.values()
            assert {float(state["step"]) for state in states} == {5.0}
            assert {torch.is_tensor(state["step"]) for state in states} == {after == "torch"}
            dense = go_on(engine, forge, other, 5, 6)[6]["dense"]
            results[before, after] = max((dense[name] - value).abs().max().item() for name, value in expected.items())
    return results


def test_another_implementation_of_adam_continues(tmp_path: Path) -> None:
    for pair, apart in run_distributed(own_optimizers, 2, str(tmp_path))[0].items():
        assert apart < FP32_DENSE, (pair, apart)
