"""DeepSeek-MoE v1 against the equations of its paper, in plain loops, and the names of its published files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from sparseforge_ds.model.deepseek_moe import DeepseekConfig, DeepseekForCausalLM, DeepseekModel, balance_loss, register
from sparseforge_ds.transformers_internals import CACHE, checkpoint_activations
from tests.tiny_models import BUILDERS, token_batch

IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]

# config.json of deepseek-ai/deepseek-moe-16b-base.
HUB_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekConfig",
        "AutoModel": "modeling_deepseek.DeepseekModel",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
    },
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 4096,
    "model_type": "deepseek",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0",
    "use_cache": True,
    "vocab_size": 102400,
}


def _tiny(**overrides: Any) -> PreTrainedModel:
    return BUILDERS["deepseek"](**overrides)


def _checkpoint(folder: Path, **overrides: Any) -> dict[str, Tensor]:
    """Write a checkpoint the way it is published, every name and shape spelled out here; its tensors."""
    hidden, width, expert_width, experts, shared, layers = 32, 48, 16, 4, 2, 3
    config = HUB_CONFIG | {
        "vocab_size": 64,
        "hidden_size": hidden,
        "intermediate_size": width,
        "moe_intermediate_size": expert_width,
        "n_routed_experts": experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **overrides,
    }

    def mlp(where: str, inner: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{where}.gate_proj.weight": (inner, hidden),
            f"{where}.up_proj.weight": (inner, hidden),
            f"{where}.down_proj.weight": (hidden, inner),
        }

    # One dense layer, then mixtures: the router, shared experts, and a list of routed ones.
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (64, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (64, hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        if layer == 0:
            shapes |= mlp(f"{at}.mlp", width)
            continue
        shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
        shapes |= mlp(f"{at}.mlp.shared_experts", shared * expert_width)
        for expert in range(experts):
            shapes |= mlp(f"{at}.mlp.experts.{expert}", expert_width)
    # Norms lie about 1, everything else about 0.
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (1.0 if len(shape) == 1 else 0.0) + 0.3 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


# The paper, one token at a time, in fp64 and from the published tensors.


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight


def _rotate(x: Tensor, position: int) -> Tensor:
    """RoPE: the pair (x_i, x_{i + d/2}) turns by position * 10000^(-2i / d)."""
    half = len(x) // 2
    turned = x.clone()
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(x))
        turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        turned[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return turned


def _mlp(x: Tensor, tensors: dict[str, Tensor], where: str) -> Tensor:
    gate, up, down = (tensors[f"{where}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    gated = gate @ x
    return down @ (gated / (1 + (-gated).exp()) * (up @ x))


def _mixture(x: Tensor, tensors: dict[str, Tensor], where: str, K: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """Equations 9 to 11 without the residual: the sum of g_i FFN_i(u) and the shared experts; and the scores s."""
    logits = tensors[f"{where}.gate.weight"] @ x
    score = logits.exp() / logits.exp().sum()
    best = sorted(range(len(score)), key=lambda i: -float(score[i].detach()))[:K]
    total = sum(float(score[i]) for i in best) if normalized else 1.0
    output = _mlp(x, tensors, f"{where}.shared_experts")
    for i in best:
        output = output + score[i] / total * _mlp(x, tensors, f"{where}.experts.{i}")
    return output, score


def _attention(x_SH: list[Tensor], tensors: dict[str, Tensor], where: str, heads: int) -> list[Tensor]:
    q, k, v, o = (tensors[f"{where}.{name}_proj.weight"] for name in "qkvo")
    size = len(x_SH[0]) // heads
    outputs = []
    for t, x in enumerate(x_SH):
        parts = []
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            query = _rotate((q @ x)[own], t)
            past = [_rotate((k @ x_SH[j])[own], j) @ query / math.sqrt(size) for j in range(t + 1)]
            share = torch.stack(past).softmax(0)
            parts.append(sum(share[j] * (v @ x_SH[j])[own] for j in range(t + 1)))
        outputs.append(o @ torch.cat(parts))
    return outputs


def _paper(ids: list[int], tensors: dict[str, Tensor], K: int = 2, normalized: bool = False) -> tuple[Tensor, list]:
    """(S, V) logits of one sequence, and the scores of every mixture: a list of (S, E)."""
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
    x_SH = [tensors["model.embed_tokens.weight"][i] for i in ids]
    scores = []
    for layer in range(layers):
        at = f"model.layers.{layer}"
        normed = [_norm(x, tensors[f"{at}.input_layernorm.weight"]) for x in x_SH]
        x_SH = [x + y for x, y in zip(x_SH, _attention(normed, tensors, f"{at}.self_attn", 4), strict=True)]
        normed = [_norm(x, tensors[f"{at}.post_attention_layernorm.weight"]) for x in x_SH]
        if f"{at}.mlp.gate.weight" in tensors:
            pair = [_mixture(x, tensors, f"{at}.mlp", K, normalized) for x in normed]
            scores.append(torch.stack([score for _, score in pair]))
            outputs = [output for output, _ in pair]
        else:
            outputs = [_mlp(x, tensors, f"{at}.mlp") for x in normed]
        x_SH = [x + y for x, y in zip(x_SH, outputs, strict=True)]
    return torch.stack([tensors["lm_head.weight"] @ _norm(x, tensors["model.norm.weight"]) for x in x_SH]), scores


def _balance(score_SE: Tensor, K: int) -> float:
    """Equations 12 to 14 without the factor: sum over experts of f_i P_i."""
    S, E = score_SE.shape
    loss = 0.0
    for i in range(E):
        chosen = sum(1 for row in score_SE if sum(1 for other in row if other > row[i]) < K)
        loss += E / (K * S) * chosen * float(score_SE[:, i].mean())
    return loss


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("normalized", [False, True])
def test_forward_is_the_paper(tmp_path: Path, implementation: str, normalized: bool) -> None:
    tensors = _checkpoint(tmp_path / "model", norm_topk_prob=normalized)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", experts_implementation=implementation)
    assert model.config._experts_implementation == implementation
    batch = token_batch()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
    for ids, result in zip(batch["input_ids"].tolist(), logits, strict=True):
        expected, _ = _paper(ids, tensors, normalized=normalized)
        torch.testing.assert_close(result.double(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_those_of_the_paper(tmp_path: Path, implementation: str) -> None:
    """Autograd through the literal loops, against the gradients of the fused experts and all else."""
    tensors = _checkpoint(tmp_path / "model", aux_loss_alpha=0.0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", experts_implementation=implementation)
    ids = token_batch(batch=1, length=7)["input_ids"]
    model.train()(input_ids=ids, labels=ids).loss.backward()
    leaves = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    logits, _ = _paper(ids[0].tolist(), leaves)
    torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    for layer in (1, 2):
        experts = model.model.layers[layer].mlp.experts
        for expert in range(4):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            up = torch.cat([leaves[f"{at}.{name}_proj.weight"].grad for name in ("gate", "up")])
            torch.testing.assert_close(experts.gate_up_proj.grad[expert].double(), up, rtol=1e-3, atol=1e-5)
            down = leaves[f"{at}.down_proj.weight"].grad
            torch.testing.assert_close(experts.down_proj.grad[expert].double(), down, rtol=1e-3, atol=1e-5)
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            torch.testing.assert_close(parameter.grad.double(), leaves[name].grad, rtol=1e-3, atol=1e-5, msg=name)


def test_saved_names_load_and_come_back_unchanged(tmp_path: Path) -> None:
    tensors = _checkpoint(tmp_path / "model")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert isinstance(model, DeepseekForCausalLM)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    gate_up = model.model.layers[2].mlp.experts.gate_up_proj
    halves = [tensors[f"model.layers.2.mlp.experts.3.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(gate_up[3], torch.cat(halves))
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())


def test_the_saved_config_names_the_class_and_no_code(tmp_path: Path) -> None:
    _checkpoint(tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved["architectures"] == ["DeepseekForCausalLM"]
    assert saved["model_type"] == "deepseek"
    assert "auto_map" not in saved
    arguments = json.loads((tmp_path / "model" / "config.json").read_text())
    for key in ("auto_map", "torch_dtype", "rope_theta", "rope_scaling", "transformers_version"):
        arguments.pop(key)  # transformers 5 spells these in another way
    assert {key: saved[key] for key in arguments} == arguments
    assert saved["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert sorted(path.name for path in (tmp_path / "again").iterdir() if path.suffix == ".py") == []


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    """Load a checkpoint that names Python files; here they are bombs."""
    _checkpoint(tmp_path / "model")
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (tmp_path / "model" / name).write_text("raise RuntimeError('remote code was run')\n")
    assert type(AutoConfig.from_pretrained(tmp_path / "model")) is DeepseekConfig
    assert type(AutoModel.from_pretrained(tmp_path / "model")) is DeepseekModel
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "model")) is DeepseekForCausalLM


def test_the_published_config_has_the_published_sizes() -> None:
    """16.4 B parameters in all, 2.8 B of them for a token (section 5.1.2 of the paper)."""
    config = DeepseekConfig(**{key: value for key, value in HUB_CONFIG.items() if key != "architectures"})
    with torch.device("meta"):
        model = DeepseekForCausalLM(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    of_experts = sum(p.numel() for n, p in model.named_parameters() if ".mlp.experts." in n)
    assert round(total / 1e9, 1) == 16.4
    assert round((total - of_experts * (64 - 6) / 64) / 1e9, 1) == 2.8
    assert tuple(model.model.layers[27].mlp.experts.gate_up_proj.shape) == (64, 2816, 2048)
    assert tuple(model.model.layers[1].mlp.shared_experts.up_proj.weight.shape) == (2816, 2048)
    assert tuple(model.model.layers[0].mlp.up_proj.weight.shape) == (10944, 2048)


@pytest.mark.parametrize("per_sequence", [True, False])
def test_the_balance_loss_is_the_paper(tmp_path: Path, per_sequence: bool) -> None:
    tensors = _checkpoint(tmp_path / "model", aux_loss_alpha=0.01, seq_aux=per_sequence)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").train()
    batch = token_batch()
    output = model(**batch)
    scores = [_paper(ids, tensors)[1] for ids in batch["input_ids"].tolist()]  # by sequence, then layer
    if per_sequence:
        expected = sum(_balance(score_SE, 2) for sequence in scores for score_SE in sequence) / len(scores)
    else:
        expected = sum(_balance(torch.cat(layer), 2) for layer in zip(*scores, strict=True))
    assert output.aux_loss.item() == pytest.approx(0.01 * expected, rel=1e-5)
    plain = model.eval()(**batch)
    assert plain.aux_loss is None and plain.router_logits is None
    assert (output.loss - plain.loss).item() == pytest.approx(0.01 * expected, rel=1e-3)
    torch.testing.assert_close(output.logits, plain.logits)


def test_a_balanced_router_has_balance_loss_one() -> None:
    assert balance_loss(torch.zeros(2, 8, 4), 4).item() == pytest.approx(1.0)
    skewed = torch.zeros(2, 8, 4)
    skewed[..., 0] = 5.0
    assert balance_loss(skewed, 1).item() > 3.5


def test_the_balance_loss_reaches_the_router_through_activation_checkpointing() -> None:
    batch = token_batch()
    gradients = []
    for kwargs in (None, {"use_reentrant": False}):
        model = _tiny(aux_loss_alpha=10.0).train()
        if kwargs:
            checkpoint_activations(model, **kwargs)
        model(**batch).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        without = _tiny(aux_loss_alpha=0.0).train()
        without(**batch).loss.backward()
        router = "model.layers.1.mlp.gate.weight"
        assert (gradients[-1][router] - without.get_parameter(router).grad).abs().max() > 1e-2
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], msg=name)


def test_a_trainer_that_accumulates_counts_the_balance_loss_once() -> None:
    model = _tiny(aux_loss_alpha=10.0).train()
    batch = token_batch()
    step_at_once = model(**batch, num_items_in_batch=batch["labels"][:, 1:].numel())
    assert step_at_once.loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    # Of four micro-batches that are alike, each is a quarter of the step.
    part = model(**batch, num_items_in_batch=4 * batch["labels"][:, 1:].numel())
    assert 4 * part.loss.item() == pytest.approx(step_at_once.loss.item(), rel=1e-6)


def test_labels_loss_is_the_shifted_cross_entropy() -> None:
    model = _tiny().eval()
    batch = token_batch()
    batch["labels"][1, :5] = -100
    output = model(**batch)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)


def test_bf16_routes_in_the_dtype_that_is_asked_for() -> None:
    for fp32_router, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        model = _tiny(fp32_router=fp32_router).bfloat16()
        logits_TE, routing_TK, _ = model.model.layers[1].mlp.gate(torch.randn(1, 3, 32, dtype=torch.bfloat16))
        assert logits_TE.dtype == routing_TK.dtype == dtype
        assert model(**token_batch()).logits.dtype == torch.bfloat16


def test_a_cache_changes_nothing() -> None:
    model = _tiny().eval()
    ids = token_batch(batch=1)["input_ids"]
    with torch.no_grad():
        full = model(input_ids=ids).logits
        cache = DynamicCache(config=model.config)
        parts = [model(input_ids=part, **{CACHE: cache}, use_cache=True).logits for part in ids.split(5, dim=1)]
        last = model(input_ids=ids, logits_to_keep=1).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), full)
    torch.testing.assert_close(last, full[:, -1:])


@pytest.mark.parametrize(
    ("overrides", "mixtures"),
    [
        ({"first_k_dense_replace": 0, "num_hidden_layers": 3}, [0, 1, 2]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2, "num_hidden_layers": 5}, [2, 4]),
        ({"n_routed_experts": None, "num_experts_per_tok": None}, []),
    ],
)
def test_the_config_chooses_the_layers_that_are_mixtures(overrides: dict[str, Any], mixtures: list[int]) -> None:
    model = _tiny(**overrides).train()
    assert [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")] == mixtures
    output = model(**token_batch())
    assert (output.aux_loss is None) == (not mixtures)


def test_a_model_without_shared_experts_has_a_loss() -> None:
    model = _tiny(n_shared_experts=None)
    assert not any("shared" in name for name, _ in model.named_parameters())
    assert model(**token_batch()).loss.isfinite()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scoring_func": "sigmoid"}, 'scoring_func = "sigmoid": DeepSeek-MoE v1 only knows "softmax"'),
        ({"num_experts_per_tok": None}, "num_experts_per_tok = None with n_routed_experts = 4: use an integer from 1"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5 with n_routed_experts = 4: use an integer from 1 to 4"),
    ],
)
def test_an_impossible_config_is_an_error(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _tiny(**overrides)


def test_registering_twice_is_once() -> None:
    register()
    assert type(AutoConfig.for_model("deepseek")) is DeepseekConfig
