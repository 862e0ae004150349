"""A probe leaves no trace, and what it measures is what the equations say."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparseforge_ds.curvature.running_curvature import ESTIMATORS, SUMS_ESTIMATORS
from sparseforge_ds.curvature.running_sums import RunningSums
from sparseforge_ds.mask.random_numbers import counter_key, rademacher
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.transformers_internals import checkpoint_activations
from sparseforge_ds.zero.extra_passes import ExtraPasses, batches_of
from tests import tiny_models
from tests.distributed import run_distributed
from tests.reference import ReferenceForge
from tests.zero.case import MODELS, Case, added_up, batch_at, build, my_part, probe_of, published, run, train_step

KINDS = ("hutchinson", "weights", "fisher", "wanda")
NOTHING_HAPPENS = {"max_steps": 1000, "method": {"update_every": 50, "hardening": [0.1, 0.3]}}
SCHEDULER = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-3, "warmup_num_steps": 5}}
}
ODD = {"exclude": ["*.down_proj.weight"]}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
NO_CPU_ADAM = {"zero_force_ds_cpu_optimizer": False}


def traced(stage: int, dtype: str, **more: Any) -> Case:
    settings = {**SCHEDULER, **more.pop("more", {})}
    return Case(stage, dtype, config=NOTHING_HAPPENS, gas=2, clip=0.2, steps=3, more=settings, **more)


CASES: dict[str, Case] = {
    f"{stage}-{dtype}": traced(stage, dtype)
    for stage, dtypes in ((0, "fp32 bf16 fp16"), (1, "bf16"), (2, "fp32 fp16"), (3, "fp32 bf16 fp16"))
    for dtype in dtypes.split()
}
CASES["1-bf16-fp32-accumulation"] = traced(1, "bf16", more={"data_types": {"grad_accum_dtype": "fp32"}})
CASES["2-fp16-offload"] = traced(2, "fp16", zero=OFFLOAD, more=NO_CPU_ADAM)
CASES["3-bf16-offload"] = traced(3, "bf16", zero={**OFFLOAD, "offload_param": {"device": "cpu"}}, more=NO_CPU_ADAM)
CASES["3-fp32-small-sub-groups"] = traced(3, "fp32", zero={"sub_group_size": 300})


def model_with_dropout() -> Any:
    return tiny_models.tiny_gpt2(
        n_embd=20, n_layer=1, n_head=2, vocab_size=40, n_positions=16, resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2
    )


def named(kind: str, config: Any) -> Any:
    """Return the config with an importance; `weights` is hutchinson without `per_token`, `elements` unsummed fisher."""
    if kind == "weights":
        return replace(config, importance="hutchinson", curvature=replace(config.curvature, per_token=False))
    if kind == "elements":
        return replace(config, importance="fisher", curvature=replace(config.curvature, factored=False))
    return replace(config, importance=kind)


def sampler(kind: str, forge: Any, config: Any) -> Any:
    """Return a function (probe, step, probes) that samples an importance on an engine, one full tensor a weight.

    Of elements these are all of a weight, of sums its row sums and its column sums.
    """
    config = named(kind, config)
    context = forge.curvature.context
    # Sums: take the sample as a running mean of one refresh, and add up over ranks.
    if config.keeps_sums:
        summed = SUMS_ESTIMATORS[config.importance](context, config)

        def sample_sums(probe: Any, step: int, probes: int) -> dict[str, Tensor]:
            assert summed.refresh(batches_of(probe), step, probes)
            running = RunningSums(context.empty_sums)
            running.take(*summed.finish(), torch.ones(len(context.matrices.names)))
            full = running.gather()
            return {name: full.weight_sums(name).clone() for name in context.shards}

        return sample_sums
    # Elements: each rank has those of its shards.
    estimator = ESTIMATORS[config.importance](context, config)

    def sample_elements(probe: Any, step: int, probes: int) -> dict[str, Tensor]:
        sample = context.zeros()
        assert estimator.refresh(batches_of(probe), step, probes, sample, forge.method.write_masters)
        parts = {name: torch.zeros(forge.sharded.prunable[name].numel) for name in context.shards}
        for name, shard in context.shards.items():
            parts[name][shard.start : shard.stop] = sample[name]
        return added_up(parts, forge.sharded.layout.replicated)

    return sample_elements


def axis_sums(sample: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Row sums and column sums of a matrix's elements, end to end."""
    return torch.cat([sample.view(shape).sum(1), sample.view(shape).sum(0)])


def everything(engine: Any, forge: Any) -> dict[str, Any]:
    """Return all that a probe could have touched."""
    optimizer = engine.optimizer
    state = {f"weight {name}": value for name, value in published(engine).items()}
    for index, flat in enumerate(forge.sharded.layout.flats):
        state[f"master {index}"] = flat.detach().clone()
        for key, value in engine.basic_optimizer.state[flat].items():
            state[f"{key} {index}"] = value.clone() if isinstance(value, Tensor) else value
    scaler = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    state["scaler"] = dict(getattr(scaler, "__dict__", {}))
    state["gradients"] = [name for name, p in engine.module.named_parameters() if p.grad is not None]
    names = ("clip_grad", "overflow", "_global_grad_norm", "micro_step_id", "cur_iter")
    state |= {name: getattr(optimizer, name, None) for name in names}
    buffer = getattr(optimizer, "averaged_gradients", None)
    state["averaged"] = None if buffer is None else {k: v is not None for k, v in buffer.items()}
    names = ("global_steps", "micro_steps", "global_samples", "skipped_steps", "_is_gradient_accumulation_boundary")
    state |= {name: getattr(engine, name) for name in names}
    state["lr"] = engine.get_lr(), engine.lr_scheduler.state_dict()
    state["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in engine.basic_optimizer.param_groups]
    state["training"] = engine.module.training
    state["rng"] = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    return state


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    assert before.keys() == after.keys()
    return [key for key in before if not same(before[key], after[key])]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    return bool(left == right)


def train(case: Case, probing: bool) -> tuple[list[float], dict[str, Any], list[str]]:
    torch.manual_seed(3 + dist.get_rank())
    engine, forge = build(case, model_with_dropout())
    torch.manual_seed(5 + dist.get_rank())
    samplers = [sampler(kind, forge, case.sparseforge) for kind in KINDS]
    losses = []
    problems = []
    for step in range(case.steps):
        losses.append(train_step(engine, case, step))
        forge.step(probe_of(engine, case, step))
        if probing:
            before = everything(engine, forge)
            closure = probe_of(engine, case, step + 7)
            for kind, sample in zip(KINDS, samplers, strict=True):
                sample(closure, step, 1)
                problems += [f"step {step} {kind}: {key}" for key in differences(before, everything(engine, forge))]
            forge.soft_to_hard_gap(closure)
            forge.histograms()
            problems += [f"step {step} gap: {key}" for key in differences(before, everything(engine, forge))]
    return losses, everything(engine, forge), problems


def with_and_without(cases: dict[str, Case]) -> dict[str, list[str]]:
    result = {}
    for name, case in cases.items():
        plain = train(case, False)
        probed = train(case, True)
        later = [f"later: {key}" for key in differences(plain[1], probed[1])]
        result[name] = probed[2] + later + ([] if plain[0] == probed[0] else [f"losses {plain[0]} {probed[0]}"])
    return result


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_probe_leaves_no_trace(stage: int) -> None:
    cases = {name: case for name, case in CASES.items() if case.stage == stage}
    for rank in run_distributed(with_and_without, 2, cases):
        assert rank == {name: [] for name in cases}


# -- what is measured -------------------------------------------------------------------------------------------------


def measure(
    case: Case, kind: str, checkpointing: bool | None = None, probes: int = 1, apart: bool = False
) -> dict[str, Tensor]:
    """Return one refresh before the first step, of full weights; `checkpointing` is use_reentrant, None for none.

    `apart`: what follows a linear layer gets a copy of its output, so that nothing is done to the output in place.
    """
    model = MODELS[case.model]()
    for module in model.modules():
        if apart and isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _m, _x, y: y.clone() if isinstance(y, Tensor) else y)
    if checkpointing is not None:
        checkpoint_activations(model, checkpointing)
    engine, forge = build(case, model)
    return sampler(kind, forge, case.sparseforge)(probe_of(engine, case, 0), 0, probes)


def measure_all(requests: list[tuple[Any, ...]]) -> list[dict[str, Tensor]]:
    return [measure(*request) for request in requests]


def apart(actual: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Relative distance, all weights together."""
    square = sum((actual[n].double() - reference[n].double()).square().sum() for n in reference)
    return float((square / sum(t.double().square().sum() for t in reference.values())).sqrt())


def exact_samples(case: Case) -> dict[str, Tensor]:
    """v (H D v) / D by double backward, D the RMS of each matrix: a step is as long as its matrix is large."""
    model = MODELS[case.model]()
    names = [weight.name for weight in prunable_weights(model, case.sparseforge)]
    weights = [model.get_parameter(name) for name in names]
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(**batch_at(0)).loss
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        vectors = [
            rademacher(counter_key(0, 0, 0, name), 0, weight.numel(), weight.device).view_as(weight)
            for name, weight in zip(names, weights, strict=True)
        ]
        sizes = [weight.detach().square().mean().sqrt() for weight in weights]
        steps = [vector * size for vector, size in zip(vectors, sizes, strict=True)]
        products = torch.autograd.grad(gradients, weights, grad_outputs=steps)
    return {n: (v * hv / r).flatten() for n, v, hv, r in zip(names, vectors, products, sizes, strict=True)}


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradient_difference_is_the_exact_hessian_vector_product(world_size: int) -> None:
    stages = [0, 1, 2, 3] if world_size == 3 else [0, 3]
    cases = [Case(stage=stage, model=model, clip=0.01, gas=2) for stage in stages for model in ("llama", "gpt2")]
    results = run_distributed(measure_all, world_size, [(case, "weights") for case in cases])[0]
    for case, actual in zip(cases, results, strict=True):
        assert apart(actual, exact_samples(case)) < 1e-3, (case.stage, case.model)


def test_per_token_curvature_is_the_explicit_one() -> None:
    requests = [
        (Case(stage=stage, model=model, clip=0.01, gas=2, config=ODD if model == "llama_odd" else {}), kind, None, 2)
        for stage in (0, 1, 2, 3)
        for model, kind in (
            ("llama", "fisher"),
            ("llama", "elements"),
            ("gpt2", "fisher"),
            ("gpt2", "wanda"),
            ("llama_odd", "hutchinson"),
            ("gpt2", "hutchinson"),
        )
    ]
    for (case, kind, *_), actual in zip(requests, run_distributed(measure_all, 3, requests)[0], strict=True):
        model = MODELS[case.model]()
        axes = {weight.name: weight.input_axis for weight in prunable_weights(model, case.sparseforge)}
        config = named(kind, case.sparseforge)
        reference = ReferenceForge(model, axes, config.to_dict(), lr=0.0)
        expected = reference.curvature_sample(config.importance, [batch_at(0)], 2)
        if config.keeps_sums:
            expected = {name: axis_sums(value, tuple(reference.master[name].shape)) for name, value in expected.items()}
        bound = 1e-3 if kind == "hutchinson" else 1e-5  # of a difference of gradients
        assert apart(actual, expected) < bound, (case.stage, kind)


def with_weight_gradients(self: ExtraPasses, passes: Any) -> None:
    """Make the passes of `activations` in which weights have gradients as well, to compare with."""
    assert self.gradients(passes, lambda _index, _gradient: None)


def measure_both_ways(requests: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    result = measure_all(requests)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ExtraPasses, "activations", with_weight_gradients)
        return list(zip(result, measure_all(requests), strict=True))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_hooks_need_no_gradients_of_weights(stage: int) -> None:
    requests = [
        (Case(stage, dtype, model, gas=2), kind, checkpointing)
        for dtype, model, kind in (
            ("fp32", "llama", "fisher"),
            ("bf16", "gpt2", "fisher"),
            ("fp32", "llama", "hutchinson"),
            ("fp32", "qwen3_moe", "fisher"),
            ("fp32", "qwen3_moe", "elements"),
        )
        for checkpointing in (None, False, True)
    ]
    for request, (without, as_well) in zip(requests, run_distributed(measure_both_ways, 2, requests)[0], strict=True):
        for name, result in without.items():
            assert result.any() and torch.equal(result, as_well[name]), (request, name)


@pytest.mark.parametrize("stage", [2, 3])
def test_activation_checkpointing_gives_the_same_curvature(stage: int) -> None:
    requests = [
        (Case(stage=stage), kind, checkpointing)
        for kind in ("fisher", "elements", "hutchinson", "weights", "wanda")
        for checkpointing in (None, False, True)
    ]
    results = run_distributed(measure_all, 2, requests)[0]
    for i in range(0, len(requests), 3):
        for j in (1, 2):
            assert apart(results[i + j], results[i]) < (1e-3 if requests[i][1] == "weights" else 1e-6), requests[i + j]


IN_PLACE: dict[str, dict[str, Any]] = {"falcon": {}, "falcon_new": {}, "llama4": {"exclude": ["*.experts.*"]}}


def measure_in_place(requests: list[tuple[Any, ...]]) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]]]:
    runs = [Case(stage, model=model, config=config, steps=4) for model, config in IN_PLACE.items() for stage in (1, 3)]
    return measure_all(requests), [run(case) for case in runs]


def test_outputs_may_be_changed_in_place() -> None:
    """Compare with the gradient of the output before the change, with and without recomputed activations.

    ZeRO-3 has hooks of its own between a hook and what changes its output; the other stages have none.
    """
    requests = [
        (Case(stage=2, model=model, config=config), kind, checkpointing, 1, copied)
        for model, config in IN_PLACE.items()
        for kind in ("fisher", "hutchinson", "wanda")
        for checkpointing, copied in ((None, True), (None, False), (False, False), (True, False))
    ]
    results, runs = run_distributed(measure_in_place, 2, requests)[0]
    for i in range(0, len(requests), 4):
        assert all(results[i][name].any() for name in results[i]), requests[i]
        for j in (1, 2, 3):
            assert apart(results[i + j], results[i]) < 1e-6, requests[i + j]
    for record in runs:
        assert len(record["updates"]) == 2 and record["losses"][-1] < record["losses"][0]


def prefetch_traces(kinds: tuple[str, ...]) -> dict[tuple[str, bool], set[str]]:
    """Return ZeRO-3's opinion of its record of the order of modules, from the third step on, per kind."""
    records = {}
    for kind in kinds:
        for checkpointing in (False, True):
            own = {"source": "training"} if kind == "training" else {}
            importance = "fisher" if kind == "training" else kind
            case = Case(stage=3, config={"importance": importance, "max_steps": 100, "curvature": own})
            model = MODELS[case.model]()
            if checkpointing:
                checkpoint_activations(model)
                model.train()
            engine, forge = build(case, model)
            coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
            (key,) = (key for key in vars(coordinator) if key.endswith("__trace_mode"))
            modes = []
            for step in range(5):
                train_step(engine, case, step)
                modes.append(vars(coordinator)[key].name)
                forge.step(probe_of(engine, case, step))
                modes.append(vars(coordinator)[key].name)
            records[kind, checkpointing] = set(modes[4:])
    return records


def test_prefetching_survives_probes() -> None:
    """Keep the order of modules: another one would cost the next two steps their prefetches."""
    kinds = ("hutchinson", "fisher", "wanda", "training")
    (records, _) = run_distributed(prefetch_traces, 2, kinds)
    assert records == {(kind, checkpointing): {"COMPLETE"} for kind in kinds for checkpointing in (False, True)}


# -- probes at outputs ------------------------------------------------------------------------------------------------


def exact_token_diagonal() -> dict[str, Tensor]:
    """Row and column sums of what tokens add up to, D_to x_ti^2, every D_to by double backward."""
    case = Case()
    model = MODELS[case.model]()
    names = [weight.name for weight in prunable_weights(model, case.sparseforge)]
    moved: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}

    def displace(name: str, x: Tensor, y: Tensor) -> Tensor:
        inputs[name] = x.detach()[0].double()
        moved[name] = torch.zeros_like(y, requires_grad=True)
        return y + moved[name]

    for name in names:
        model.get_submodule(name.removesuffix(".weight")).register_forward_hook(
            lambda _module, args, output, name=name: displace(name, args[0], output)
        )
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(**one_sequence()).loss
        gradients = torch.autograd.grad(loss, [moved[name] for name in names], create_graph=True)
    # Differentiate every element of the gradient once more by its own output.
    result = {}
    for name, gradient in zip(names, gradients, strict=True):
        slope = torch.zeros(gradient[0].shape, dtype=torch.float64)
        for t, row in enumerate(gradient[0]):
            for o, element in enumerate(row):
                slope[t, o] = torch.autograd.grad(element, moved[name], retain_graph=True)[0][0, t, o]
        square = inputs[name].square()
        result[name] = torch.cat([slope.t() @ square.sum(1), slope.sum(1) @ square])
    return result


def one_sequence() -> dict[str, Tensor]:
    return {key: value[:1] for key, value in batch_at(0).items()}


def samples_at_outputs() -> list[dict[str, Tensor]]:
    case = Case(config={"importance": "hutchinson", "curvature": {"radius": 0.03}})
    engine, forge = build(case)
    batch = one_sequence()
    sample = sampler("hutchinson", forge, case.sparseforge)
    return [sample(lambda: engine(**batch).loss, step, 16) for step in range(24)]


def test_probes_at_outputs_are_unbiased() -> None:
    """Within five standard errors, which the samples tell, of what every token's own curvature adds up to."""
    samples = run_distributed(samples_at_outputs, 1)[0]
    expected = exact_token_diagonal()
    errors = []
    for name, exact in expected.items():
        item = torch.stack([sample[name] for sample in samples]).double()
        error = item.std(0) / len(item) ** 0.5
        assert ((item.mean(0) - exact).abs() < 5 * error + 1e-3 * exact.abs().max()).all(), name
        errors.append((error.square().sum() / exact.double().square().sum()).sqrt().item())
    assert min(errors) < 0.3  # there is something to see


def test_curvature_of_outputs_in_low_precision_is_that_of_fp32() -> None:
    exact, bf16, fp16 = run_distributed(outputs_by_dtype, 2)[0]
    assert apart(bf16, exact) < 0.3 and apart(fp16, exact) < 0.05


def outputs_by_dtype() -> list[dict[str, Tensor]]:
    return [measure(Case(stage=3, dtype=dtype), "hutchinson", probes=4) for dtype in ("fp32", "bf16", "fp16")]


def misuses_of_outputs() -> list[str]:
    messages = []
    for case, times in ((Case(model="qwen3_moe"), 1), (Case(), 2)):
        case = replace(case, config={"importance": "hutchinson", "method": {"update_every": 1}})
        try:
            engine, forge = build(case)
            train_step(engine, case, 0)
            probe = probe_of(engine, case, 0)
            forge.step(probe if times == 1 else lambda probe=probe: probe() + probe())
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_weights_without_outputs_of_their_own_are_named() -> None:
    experts, twice = run_distributed(misuses_of_outputs, 1)[0]
    assert "mlp.experts." in experts and '"per_token": false' in experts
    assert "called more than once" in twice and "proj.weight" in twice


def lower_precision_scale(stage: int) -> list[float]:
    """fp16 gradients are unscaled: curvature is that of fp32, as a number and not just up to a factor."""
    exact = measure(Case(stage=stage), "fisher")
    return [apart(measure(Case(stage=stage, dtype=dtype), "fisher"), exact) for dtype in ("bf16", "fp16")]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_curvature_of_low_precision_is_that_of_fp32(stage: int) -> None:
    bf16, fp16 = run_distributed(lower_precision_scale, 2, stage)[0]
    assert bf16 < 0.1 and fp16 < 0.02


def bad_probes() -> list[str]:
    case = Case(config={"method": {"update_every": 1}})
    engine, forge = build(case)
    messages = []
    for probe in (None, lambda: 3.0, lambda: engine(**my_part(batch_at(0))).loss.detach()):
        engine_, forge_ = build(case)
        train_step(engine_, Case(), 0)
        try:
            forge_.step(probe)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_value_that_is_no_probe_is_named() -> None:
    messages = run_distributed(bad_probes, 1)[0]
    assert len(messages) == 3
    assert all("lambda: engine(**batch).loss" in message for message in messages)
