"""Mistakes that a user of `SparseForge` can make, and what must hold when nothing is wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import sparseforge_ds as sf
from sparseforge_ds.model.branch import branches
from tests.distributed import run_distributed
from tests.reference import branch_start, groups_of, kept_of
from tests.zero.case import (
    MODELS,
    Case,
    batch_at,
    build,
    build_engine,
    gathered,
    my_part,
    probe_of,
    published,
    train_step,
)

# -- frozen -----------------------------------------------------------------------------------------------------------

FROZEN: dict[str, Case] = {
    "1:4 stage 0": Case(stage=0, config={"pattern": "1:4", "importance": "magnitude"}),
    "2:4 stage 1 bf16": Case(stage=1, dtype="bf16", config={"exclude": ["*.k_proj.weight"]}),
    "block stage 2": Case(stage=2, model="llama_tiles", config={"pattern": "block16:0.25"}),
    "conv1d stage 3 bf16": Case(stage=3, dtype="bf16", model="gpt2"),
    "fixed stage 3": Case(stage=3, config={"method": {"hardening": [0.0, 0.0]}}),
}


def train_frozen(case: Case) -> list[str]:
    engine, forge = build(case)
    forge.start(probe_of(engine, case, 0))
    problems: list[str] = []
    chosen: dict[str, torch.Tensor] = {}
    for step in range(12):
        train_step(engine, case, step)
        with mock.patch.object(logging.getLogger("sparseforge_ds.forge"), "warning") as warning:
            updated = forge.step(probe_of(engine, case, step))
        if warning.called != (dist.get_rank() == 0 and step == 10):
            problems.append(f"step {step + 1}: warned {warning.called} about steps behind max_steps")
        if forge.phase != "frozen":
            continue
        assert updated == (forge.step_count == forge.schedule.freeze_step)
        weights = published(engine)
        for weight in forge.weights:
            value = weights[weight.name]
            group_GM = value.flatten()[
                torch.tensor(groups_of(case.sparseforge.pattern, weight.shape, weight.input_axis))
            ]
            if (group_GM != 0).sum(1).unique().tolist() != [kept_of(case.sparseforge.pattern)]:
                problems.append(f"step {step + 1}: {weight.name} has other than N non-zeros in a group")
            if (value.signbit() & (value == 0)).any():
                problems.append(f"step {step + 1}: {weight.name} has a -0.0")
            if not torch.equal(chosen.setdefault(weight.name, value != 0), value != 0):
                problems.append(f"step {step + 1}: the mask of {weight.name} moved")
    forge.finish()
    return problems


def train_all_frozen() -> dict[str, list[str]]:
    return {name: train_frozen(case) for name, case in FROZEN.items()}


def test_frozen_weights_are_exactly_n_of_m_and_stay_so() -> None:
    assert run_distributed(train_all_frozen, 3)[0] == {name: [] for name in FROZEN}


# -- use --------------------------------------------------------------------------------------------------------------


def message_of(action: Any) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def misuses() -> dict[str, str]:
    messages = {}
    case = Case(stage=2)

    engine, forge = build(case)
    train_step(engine, case, 0)
    train_step(engine, case, 1)
    # An engine that steps without its forge.
    messages["never called"] = message_of(forge.finish)
    messages["saved without"] = message_of(lambda: engine.save_checkpoint("nowhere"))
    messages["missed step"] = message_of(lambda: forge.step(probe_of(engine, case, 1)))

    engine, forge = build(Case(stage=2, config={"method": {"hardening": [0.0, 0.0]}}))
    # A method that needs a start.
    messages["start without probe"] = message_of(lambda: forge.start(None))
    train_step(engine, case, 0)
    messages["never started"] = message_of(lambda: forge.step(probe_of(engine, case, 0)))

    engine, forge = build(case)
    # An end before the masks are frozen, and a second forge.
    messages["finish early"] = message_of(forge.finish)
    messages["twice"] = message_of(lambda: sf.SparseForge(engine, case.sparseforge))
    # Between micro-batches `forge.step` does nothing; before `engine.step` it refuses.
    accumulating = Case(stage=2, gas=2)
    engine, forge = build(accumulating)
    engine.backward(engine(**my_part(batch_at(0))).loss)
    engine.step()
    messages["accumulating"] = str((forge.step(None), forge.step_count))
    engine.backward(engine(**my_part(batch_at(1))).loss)
    messages["before engine.step"] = message_of(lambda: forge.step(None))
    engine.set_gradient_accumulation_boundary(False)  # as accelerate, which then does not call engine.step
    messages["own boundary"] = str((forge.step(None), forge.step_count))

    engine, forge = build(case)
    # An update without its probe changes nothing, and is made by the same call with one.
    train_step(engine, case, 0)
    forge.step()
    train_step(engine, case, 1)
    messages["no probe"] = message_of(forge.step)
    messages["with it"] = str((forge.step_count, forge.step(probe_of(engine, case, 1)), forge.step_count))

    engine = build_engine(case)
    # States in 8 bits.
    engine.basic_optimizer.register_step_post_hook(in_bytes)
    forge = sf.SparseForge(engine, case.sparseforge)
    messages["8 bits"] = message_of(lambda: train_step(engine, case, 0))

    model = MODELS["llama"]()
    # Param groups that were not made by `param_groups`.
    everything = [{"params": list(model.parameters())}]
    engine = build_engine(case, model, everything)
    messages["one group"] = message_of(lambda: sf.SparseForge(engine, case.sparseforge))
    model = MODELS["llama"]()
    halves = [
        {"params": [p for n, p in model.named_parameters() if ("layers" in n and p.dim() > 1) is of_a_layer]}
        for of_a_layer in (True, False)
    ]
    unmarked = build_engine(case, model, halves)
    messages["unmarked"] = message_of(lambda: sf.SparseForge(unmarked, case.sparseforge))
    model = MODELS["llama"]()
    subset = [{"params": [p for n, p in model.named_parameters() if "q_proj" in n], "sparseforge": "prunable"}]
    partial = build_engine(case, model, subset)
    messages["left out"] = message_of(lambda: sf.SparseForge(partial, case.sparseforge))
    return messages


def in_bytes(optimizer: Any, *_: Any) -> None:
    """States in codes of 8 bits."""
    for state in optimizer.state.values():
        state["codes"] = torch.zeros_like(state.pop("exp_avg"), dtype=torch.uint8)


def test_misuse_is_named() -> None:
    messages = run_distributed(misuses, 1)[0]
    assert (
        messages["missed step"].startswith("ForgeError: 2 optimizer steps")
        and "every engine.step" in messages["missed step"]
    )
    assert messages["start without probe"].startswith("ValueError") and "probe" in messages["start without probe"]
    assert messages["never started"].startswith("ForgeError") and "forge.start(probe)" in messages["never started"]
    assert (
        "never refreshed" in messages["finish early"] and "layers.0.self_attn.q_proj.weight" in messages["finish early"]
    )
    assert messages["twice"].startswith("ValueError") and "make a new engine" in messages["twice"]
    assert messages["no probe"].startswith("ValueError") and "call forge.step(probe=" in messages["no probe"]
    assert messages["with it"] == "(1, True, 2)"
    assert "call forge.start(probe=" in messages["start without probe"]
    assert messages["accumulating"] == messages["own boundary"] == "(False, 0)"
    assert messages["before engine.step"].startswith("ForgeError: forge.step was called before engine.step")
    for name in ("never called", "saved without"):
        assert messages[name].startswith("ForgeError: forge.step was not called after 2 steps of the engine"), messages
    assert messages["8 bits"].startswith("ValueError: optimizer AdamW keeps codes in torch.uint8"), messages["8 bits"]
    for key in ("one group", "unmarked", "left out"):
        assert messages[key].startswith("ValueError") and "param_groups(model, config)" in messages[key], messages[key]


def unused_layer(case: Case, in_training: bool) -> str:
    """Leave one layer out of the probe's loss; with `in_training` it has had gradients before."""
    engine, forge = build(case)
    up_proj = engine.module.model.layers[0].mlp.up_proj

    # Cut the layer's output off its graph: in every pass, or in the probe alone.
    handle = None
    try:
        for step in range(case.steps):
            if handle is None and not in_training:
                handle = up_proj.register_forward_hook(lambda _m, _a, output: output.detach())
            train_step(engine, case, step)
            closure = probe_of(engine, case, step)

            def probe(closure: Any = closure) -> Any:
                cut = up_proj.register_forward_hook(lambda _m, _a, output: output.detach())
                try:
                    return closure()
                finally:
                    cut.remove()

            forge.step(probe)
    except RuntimeError as error:
        return str(error)
    return "no error"


TRAINING = {"curvature": {"source": "training"}}
OF_OWN_PASSES = [{}, {"importance": "hutchinson", "curvature": {"per_token": False}}]
UNUSED = [
    *(
        (Case(stage=stage, config=config, steps=3), in_training)
        for stage in (0, 2, 3)
        for config in OF_OWN_PASSES
        for in_training in (True, False)
    ),
    *((Case(stage=stage, steps=3, config=TRAINING), False) for stage in (0, 2, 3)),
]


def uncalled(ranks: set[int]) -> str:
    """Call no layer of an mlp on some ranks in the passes that choose the mask."""
    case = Case(stage=1, config={"importance": "wanda", "method": "naive_retrain"})
    engine, forge = build(case)
    if dist.get_rank() in ranks:
        engine.module.model.layers[0].mlp.forward = torch.zeros_like
    return message_of(lambda: forge.start(probe_of(engine, case, 0)))


def counted_passes() -> dict[str, int]:
    """Return how often the passes of each kind of probe ran for a starting mask that asks for four batches."""
    counts: dict[str, int] = {}
    for kind in ("a function", "batches that repeat", "batches"):
        for importance in ("wanda", "fisher"):
            block = {"importance": importance, "method": "naive_retrain", "curvature": {"first_probes": 4}}
            case = Case(stage=1, config=block)
            engine, forge = build(case)
            counts[f"{kind}, {importance}"] = 0

            def loss(key: str = f"{kind}, {importance}", engine: Any = engine) -> torch.Tensor:
                counts[key] += 1
                result: torch.Tensor = engine(**my_part(batch_at(0))).loss
                return result

            batches = SimpleNamespace(passes=lambda _batch, loss=loss: [loss], repeats="repeat" in kind)
            forge.start(loss if kind == "a function" else batches)
    return counts


def test_a_probe_that_repeats_is_measured_once(capfd: pytest.CaptureFixture[str]) -> None:
    expected = {"a function": 1, "batches that repeat": 1, "batches": 4}
    for counts in run_distributed(counted_passes, 2):
        assert counts == {f"{kind}, {name}": n for kind, n in expected.items() for name in ("wanda", "fisher")}
    assert "".join(capfd.readouterr()).count("curvature.first_probes = 4, but the probe is a function") == 2


def singular(stage: int) -> str:
    """Two tokens a rank, and next to no damping."""
    start = {"mask": "sparsegpt", "epochs": 0, "tokens": 1, "damping": 1e-30}
    block = {"start": start, "method": "naive_retrain"}
    case = Case(stage=stage, config=block)
    engine, forge = build(case)
    batch = {key: value[:1, :2] for key, value in my_part(batch_at(0)).items()}
    return message_of(lambda: forge.start(lambda: engine(**batch).loss))


def without_gradient(config: dict[str, Any], silent_steps: int) -> tuple[str, list[float]]:
    """Loss whose gradient is 0 in the first steps; what is said, and how much is kept after every update."""
    case = Case(stage=2, config=config)
    engine, forge = build(case)
    kept = []

    def train() -> None:
        if not forge.ready:
            forge.start(lambda: engine(**my_part(batch_at(0))).loss * 0)
        for step in range(case.steps):
            engine.backward(engine(**my_part(batch_at(step))).loss * (step >= silent_steps))
            engine.step()
            if forge.step():
                kept.append(forge.metrics["mask/kept"])

    return message_of(train), kept


def goes_back(folder: str) -> tuple[str, str, str]:
    """Return three messages: of a step without a layer, of one after going back, and of a resume without a gradient."""
    case = Case(stage=2, config=TRAINING)
    engine, forge = build(case)

    def train(first: int, stop: int, scale: float = 1.0) -> None:
        for step in range(first, stop):
            engine.backward(engine(**my_part(batch_at(step))).loss * scale)
            engine.step()
            forge.step()

    train(0, 3)
    engine.save_checkpoint(folder, "good")
    mlp = engine.module.model.layers[0].mlp
    mlp.forward = torch.zeros_like
    missing = message_of(lambda: train(3, 4))
    del mlp.forward
    engine.load_checkpoint(folder, "good")
    back = message_of(lambda: train(3, 4))
    # Masks that were moved by magnitude alone do not freeze after a resume either.
    engine, forge = build(case)
    train(0, 6, 0.0)
    engine.save_checkpoint(folder, "silent")
    engine, forge = build(case)
    engine.load_checkpoint(folder, "silent")
    return missing, back, message_of(lambda: train(6, 8, 0.0))


def test_what_the_curvature_lacks_is_known_after_a_resume_and_forgotten_by_going_back(tmp_path: Path) -> None:
    missing, back, silent = run_distributed(goes_back, 1, str(tmp_path))[0]
    assert "no usable curvature for 3 of 7 matrices" in missing and back == "no error"
    assert "masks were moved by the size of the weights alone up to step 7" in silent


def unused_all() -> tuple[list[str], list[str], list[str], list[tuple[str, list[float]]]]:
    message = [unused_layer(*arguments) for arguments in UNUSED]
    silent = [without_gradient(TRAINING, steps) for steps in (2, 8)]
    silent.append(without_gradient({"importance": "fisher", "method": "naive_retrain"}, 0))
    return message, [uncalled({1}), uncalled({0, 1})], [singular(0), singular(3)], silent


def test_a_layer_without_curvature_stops_the_run() -> None:
    for unused, (called_on_one, called_on_none), singular, silent in run_distributed(unused_all, 2):
        (later, kept), (never, moved), (chosen, _) = silent
        assert later == "no error" and len(kept) == 4 and kept[0] < 1, "the first masks go by magnitude"
        assert "masks were moved by the size of the weights alone up to step 7" in never and len(moved) == 3
        assert "no usable curvature for 7 of 7" in chosen and "The loss has no gradient at any of them" in chosen
        for (case, in_training), message in zip(UNUSED, unused, strict=True):
            where = (case.stage, case.sparseforge.importance, in_training, message)
            assert "no usable curvature for 1 of 7 matrices" in message and "mlp.up_proj.weight" in message, where
        assert called_on_one == "no error"
        assert "no usable curvature for 3 of 7 matrices" in called_on_none and "mlp.down_proj.weight" in called_on_none
        for message in singular:
            assert message.startswith("AgreedError") and "_proj.weight" in message, message
            assert "damping of 1e-30 is too little" in message and '"damping": 1e-29' in message, message


BLOCKS = {
    "a zero matrix": ("up_proj",),
    "identity block": ("o_proj", "down_proj"),
    "dead mlp": ("gate_proj", "up_proj"),
}
SCORES = [
    {},
    TRAINING,
    {"importance": "wanda", "method": "naive_retrain"},
    {"importance": "sparsegpt", "method": "naive_retrain"},
]
BY_WEIGHTS = {"importance": "hutchinson", "curvature": {"first_probes": 16, "probes": 8}}
"""Moves weights by a share of their size; a block whose gradients are all 0 has no usable curvature then."""


def with_zeros(config: dict[str, Any], zero: tuple[str, ...], stage: int) -> tuple[str, bool]:
    """Return the message about a model with weights of 0, as fresh blocks have them, and whether it became sparse."""
    model = MODELS["llama"]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.split(".")[-2] in zero:
                weight.zero_()
    case = Case(stage=stage, config=config, steps=10)
    engine, forge = build(case, model)

    def whole_life() -> None:
        forge.start(probe_of(engine, case, 0))
        for step in range(10):
            train_step(engine, case, step)
            forge.step(probe_of(engine, case, step))
        forge.finish()

    message = message_of(whole_life)
    weights = published(engine)
    groups = [
        (weights[w.name].flatten()[torch.tensor(groups_of("2:4", w.shape, w.input_axis))] != 0).sum(1)
        for w in forge.weights
    ]
    return message, all(bool((kept <= 2).all()) for kept in groups)


def with_zeros_all() -> dict[str, tuple[str, bool]]:
    results = {
        f"{block} {config}": with_zeros(config, zero, 2 if number % 2 else 3)
        for number, config in enumerate(SCORES)
        for block, zero in BLOCKS.items()
    }
    return results | {"hutchinson at weights": with_zeros(BY_WEIGHTS, BLOCKS["a zero matrix"], 3)}


def test_zeros_in_a_model_are_ties_and_no_error() -> None:
    for of_rank in run_distributed(with_zeros_all, 2):
        assert of_rank == dict.fromkeys(of_rank, ("no error", True))


COMPILED = [
    Case(stage=stage, model=model, config=config, steps=4)
    for stage, model, config in ((1, "llama", TRAINING), (0, "llama", {"importance": "hutchinson"}), (2, "gpt2", {}))
]


def curvature_of_compiled() -> list[list[dict[str, torch.Tensor]]]:
    """After four steps: of the model as it is, and compiled before or after the forge was attached."""
    results = []
    for case in COMPILED:
        of_case = []
        for compiles in (None, "before", "after"):
            engine = build_engine(case)
            if compiles == "before":
                engine.module.compile(backend="eager")
            forge = sf.SparseForge(engine, case.sparseforge)
            if compiles == "after":
                engine.module.compile(backend="eager")
            for step in range(case.steps):
                train_step(engine, case, step)
                forge.step(probe_of(engine, case, step))
            of_case.append(gathered(forge, "curvature"))
        results.append(of_case)
    return results


def test_compiled_layers_are_measured_as_they_are() -> None:
    for case, (plain, *compiled) in zip(COMPILED, run_distributed(curvature_of_compiled, 1)[0], strict=True):
        for first in compiled:
            for name, curvature in plain.items():
                assert curvature.any() and torch.equal(first[name], curvature), (case.stage, name)


# -- before the first update ------------------------------------------------------------------------------------------


def untouched(stage: int) -> list[bool]:
    """Return whether the published weights are the dense ones after each step, hardening from step 0 on."""
    case = Case(stage=stage, config={"method": {"hardening": [0.0, 0.6], "update_every": 3}})
    engine, forge = build(case)
    same = []
    for step in range(4):
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))
        dense = gathered(forge, "dense")
        weights = published(engine)
        same.append(all(torch.equal(dense[name], weights[name].flatten()) for name in dense))
    return same


def untouched_all() -> list[list[bool]]:
    return [untouched(stage) for stage in (0, 2, 3)]


def test_a_mask_of_ones_is_no_tie_to_be_broken() -> None:
    assert run_distributed(untouched_all, 3)[0] == [[True, True, False, False]] * 3


# -- reports ----------------------------------------------------------------------------------------------------------


def reports(stage: int, dtype: str) -> dict[str, Any]:
    case = Case(stage=stage, dtype=dtype, config={"exclude": ["*.k_proj.weight"]})
    engine, forge = build(case)
    result: dict[str, Any] = {"gaps": [], "same": []}
    for step in range(8):
        before = published(engine)
        result["gaps"].append(forge.soft_to_hard_gap(probe_of(engine, case, step)))
        result["same"].append(all(torch.equal(v, before[n]) for n, v in published(engine).items()))
        train_step(engine, case, step)
        forge.step(probe_of(engine, case, step))
        if step == 3:
            result["histograms"] = forge.histograms(8)
            result["masks"] = gathered(forge, "mask")
            result["metrics"] = dict(forge.metrics)
            result["curvature"] = gathered(forge, "curvature")
        if step == 6:
            result["projected"] = dict(forge.metrics)
    result["coverage"] = forge.coverage
    result["total"] = sum(value.numel() for value in published(engine).values())
    return result


def all_reports() -> list[dict[str, Any]]:
    return [reports(stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")]


def test_metrics_and_histograms_report_every_matrix() -> None:
    ranks = run_distributed(all_reports, 3)
    for i, result in enumerate(ranks[0]):
        assert all(result["same"]), i
        assert all(rank[i]["gaps"] == result["gaps"] for rank in ranks)
        assert abs(result["gaps"][4]) > 1e-5 and result["gaps"][7] == 0.0, result["gaps"]
        masks = torch.cat(list(result["masks"].values()))
        assert result["metrics"]["mask/undecided"] == pytest.approx((masks * (1 - masks)).mean().item(), rel=1e-5)
        assert result["metrics"]["mask/kept"] == pytest.approx(masks.mean().item(), rel=1e-5)
        assert result["projected"]["mask/undecided"] == 0.0 and result["projected"]["mask/kept"] == 0.5
        correction = 1 - 0.9**2
        curvature = torch.cat(list(result["curvature"].values())).mean().item() / correction
        assert result["metrics"]["curvature/mean"] == pytest.approx(curvature, rel=1e-4)
        for name, mask in result["masks"].items():
            counts, edges = result["histograms"][f"mask/{name}"]
            assert counts == torch.histc(mask, 8, 0, 1).int().tolist()
            assert len(edges) == 9 and sum(counts) == mask.numel()
            assert sum(result["histograms"][f"curvature_log10/{name}"][0]) == mask.numel()
        # 20 x 20 for q and o, 10 x 20 for k and v, three of 28 x 20; k is prunable but excluded.
        covered = result["coverage"]
        assert (covered.masked, covered.linear, covered.weights) == (2680, 2880, 6)
        assert covered.total == result["total"]


# -- SLoRB ------------------------------------------------------------------------------------------------------------


def moments_of(forge: sf.SparseForge, name: str) -> dict[str, Any]:
    return dict(forge.sharded.layout.inner.state[forge.sharded.layout.flats[forge.sharded.layout.shards[name].flat]])


def switch_on(case: Case) -> list[str]:
    """Check that at its step every B is the mean of what m_eff removes from each run, and trains from then on."""
    import deepspeed

    engine, forge = build(case)
    at = case.sparseforge.branch_step
    problems = []
    for step in range(case.steps):
        train_step(engine, case, step)
        dense = gathered(forge, "dense")  # of a frozen mask nothing is left where it pruned
        forge.step(probe_of(engine, case, step))
        layers = branches(engine.module)
        # Branches are on from their step on, and not before.
        if any(layer.enabled != (step + 1 >= at) for layer in layers.values()):
            problems.append(f"step {step + 1}: enabled at the wrong time")
        if step + 1 == at or step + 1 == case.steps:
            # B begins as the mean of what m_eff removes, and has moved at the end.
            weights = published(engine)
            for weight in forge.weights:
                removed = dense[weight.name].view(weight.shape) - weights[weight.name].float()
                if weight.input_axis == -2:
                    removed = removed.t()
                expected = branch_start(removed, case.sparseforge.low_rank.k)
                low_rank = layers[weight.name].low_rank_b
                with deepspeed.zero.GatheredParameters([low_rank]):
                    close = torch.allclose(low_rank.float(), expected, atol=1e-6 if case.dtype == "fp32" else 2e-3)
                if close != (step + 1 == at):
                    problems.append(
                        f"step {step + 1}: B of {weight.name} {'differs' if step + 1 == at else 'did not train'}"
                    )
                # Adam begins with the branch.
                if step + 1 == at and any(
                    value.any() if isinstance(value, torch.Tensor) else value
                    for value in moments_of(forge, f"{weight.module}.low_rank_b").values()
                ):
                    problems.append(f"Adam has counted steps of {weight.name} before its branch was there")
                if step + 1 == at and not expected.any():
                    problems.append(f"nothing is removed from {weight.name}")
    return problems


LOW_RANK: dict[str, Case] = {
    f"stage {stage} {dtype} {model} k={k} {start}": Case(
        stage=stage, dtype=dtype, model=model, config={"low_rank": {"k": k, "shift": False, "start": start}}, steps=9
    )
    for stage, dtype, model, k, start in (
        (0, "fp32", "llama", 4, None),
        (0, "bf16", "gpt2", 4, 0.5),
        (1, "bf16", "llama", 4, 0.4),
        (2, "fp32", "gpt2", 12, 0.5),  # of 20 and 80 inputs
        (3, "fp32", "llama_24", 7, 0.6),  # of 24 and 40
        (3, "bf16", "gpt2", 4, 0.8),
    )
}


def switch_on_all() -> dict[str, list[str]]:
    return {name: switch_on(case) for name, case in LOW_RANK.items()}


def test_low_rank_without_a_shift_starts_from_what_the_mask_removes() -> None:
    for rank in run_distributed(switch_on_all, 3):
        assert rank == {name: [] for name in LOW_RANK}


# -- refusals ---------------------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    messages = {}
    cases = {
        "unmanaged": Case(stage=2, more={"managed_gradient_accumulation": False}),
        "autocast": Case(stage=1, more={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        "unscaled": Case(stage=0, dtype="fp16", more={"fp16": {"loss_scale": 8}}),
        "fine": Case(stage=2),
        "replaced": Case(stage=2, more={"optimizer": {"type": "Adagrad", "params": {"lr": 1e-3}}}),
    }
    for name, case in cases.items():
        engine = build_engine(case)
        messages[name] = message_of(lambda engine=engine, case=case: sf.SparseForge(engine, case.sparseforge))
    # These need an optimizer that compiles for minutes, a disk, or a GPU to come up: the settings on an engine without.
    offload = Case(stage=3, zero={"offload_optimizer": {"device": "cpu"}}, more={"zero_force_ds_cpu_optimizer": False})
    for name, key, value in (("partial", "ratio", 0.5), ("nvme", "device", "nvme"), ("super", "super_offload", True)):
        engine = build_engine(offload)
        setattr(engine._config.zero_config.offload_optimizer, key, value)
        messages[name] = message_of(lambda engine=engine: sf.SparseForge(engine, offload.sparseforge))
    deep = Case(stage=2, model="llama_deep", config={"exclude": ["*.down_proj.weight"]})
    shared = MODELS["llama_deep"]()
    shared.model.layers[1].self_attn.q_proj.weight = shared.model.layers[0].self_attn.q_proj.weight
    engine = build_engine(deep, shared)
    messages["shared"] = message_of(lambda: sf.SparseForge(engine, deep.sparseforge))
    config = {"exclude": ["*.down_proj.weight"], "method": "naive_retrain", "importance": "sparsegpt"}
    by_inputs = Case(stage=2, model="llama_deep", config=config)
    messages["shared, sparsegpt"] = message_of(lambda: sf.SparseForge(engine, by_inputs.sparseforge))
    engine = build_engine(cases["fine"])
    engine._config.zero_config.zero_quantized_weights = True
    messages["quantized"] = message_of(lambda: sf.SparseForge(engine, cases["fine"].sparseforge))
    engine = build_engine(cases["fine"])
    engine._config.data_efficiency_enabled = True
    messages["data"] = message_of(lambda: sf.SparseForge(engine, cases["fine"].sparseforge))
    engine = build_engine(cases["fine"])
    engine.basic_optimizer.param_groups[0]["use_muon"] = True
    messages["muon"] = message_of(lambda: sf.SparseForge(engine, cases["fine"].sparseforge))
    return messages


def test_settings_that_cannot_work_are_refused() -> None:
    messages = run_distributed(refusals, 1)[0]
    for name, words in {
        "quantized": ["zero_quantized_weights", "set it to false"],
        "data": ["data_efficiency", "remove it"],
        "unmanaged": ["managed_gradient_accumulation", "set it to true"],
        "autocast": ["torch_autocast", "bf16"],
        "unscaled": ["fp16 at ZeRO stage 0", '"loss_scale": 1'],
        "partial": ["ratio = 0.5", "set 1.0"],
        "nvme": ['"nvme"', 'set "cpu"'],
        "super": ["super_offload", "set it to false"],
        "muon": ["Muon", "use AdamW"],
        "replaced": ["Adagrad", "ZeRO put another one in its place", "use AdamW"],
    }.items():
        assert messages[name].startswith("ValueError: cannot train a mask"), messages[name]
        assert [word for word in words if word not in messages[name]] == [], messages[name]
    for name in ("shared", "shared, sparsegpt"):
        assert "are one weight, and one of the layers alone would be measured; set" in messages[name], messages[name]
    assert messages["fine"] == "no error"
