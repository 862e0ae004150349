from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

from sparseforge_ds.config import LowRankConfig, SparseForgeConfig
from sparseforge_ds.config.run_state import SparseWeight
from sparseforge_ds.export.adapter import block_sum, branch_of_key, key_of, write_adapter
from sparseforge_ds.export.source import Source
from tests.sparse_folders import ModelSource
from tests.tiny_models import tiny_gpt2, tiny_llama

K = 12
# Name of the module -> (outputs, inputs, rank); the last run of inputs is shorter than 12.
CASES: dict[str, dict[str, tuple[int, int, int]]] = {
    "llama": {
        "model.layers.0.self_attn.q_proj": (32, 32, 3),
        "model.layers.1.self_attn.q_proj": (32, 32, 3),
        "model.layers.1.mlp.down_proj": (32, 64, 6),
    },
    "gpt2": {"transformer.h.0.attn.c_attn": (96, 32, 3), "transformer.h.1.mlp.c_proj": (32, 128, 11)},
}


def branches_of(
    branch: dict[str, Tensor], layers: dict[str, Any], input_axis: int, dtype: torch.dtype, learned: bool = False
) -> Source:
    """Return a source that has these tensors of branches, and of its weights only their shapes."""
    source = object.__new__(ModelSource)
    source.branches = {name: (outputs, rank) for name, (outputs, _, rank) in layers.items()}
    source.prunable = {}
    source.dtype = dtype
    source.folder = Path("run")
    source.record = {"config": SparseForgeConfig(low_rank=LowRankConfig(k=K, learned=learned)).to_dict()}
    for name, (outputs, inputs, _) in layers.items():
        shape = (outputs, inputs) if input_axis == -1 else (inputs, outputs)
        source.prunable[f"{name}.weight"] = SparseWeight(f"{name}.weight", shape, input_axis)
    source.read_branch = branch.__getitem__  # type: ignore[method-assign]
    return source


def test_block_sum_has_ones_for_each_run() -> None:
    assert block_sum(6, 3, torch.float32).tolist() == [[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]
    assert block_sum(5, 3, torch.float32).tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]
    assert block_sum(3, 10**12, torch.float32).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("family", CASES)
def test_peft_computes_the_branch_of_the_paper(tmp_path: Path, family: str, learned: bool) -> None:
    """y = x (w^T + P^T B^T), with another rank in every size of layer."""
    layers = CASES[family]
    branch = {f"{name}.low_rank_b": torch.randn(outputs, rank) for name, (outputs, _, rank) in layers.items()}
    p_of = {name: block_sum(inputs, K, torch.float32) for name, (_, inputs, _) in layers.items()}
    if learned:
        p_of = {name: torch.randn(rank, inputs) for name, (_, inputs, rank) in layers.items()}
        branch |= {f"{name}.low_rank_p": p for name, p in p_of.items()}
    source = branches_of(branch, layers, -2 if family == "gpt2" else -1, torch.float32, learned)
    write_adapter(source, tmp_path)
    build: Any = {"llama": tiny_llama, "gpt2": tiny_gpt2}[family]
    ours = build().eval()
    ids = torch.arange(16)[None]
    with torch.no_grad():
        for name in layers:
            added: Tensor = branch[f"{name}.low_rank_b"] @ p_of[name]
            layer = ours.get_submodule(name)
            layer.weight += added if isinstance(layer, nn.Linear) else added.T
        adapted = PeftModel.from_pretrained(build(), tmp_path).eval()
        result, expected, without = (model(ids).logits for model in (adapted, ours, build().eval()))
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    assert (expected - without).abs().max() > 0.1


def test_an_adapter_is_the_two_files_of_peft(tmp_path: Path) -> None:
    layers = CASES["llama"]
    zeros = {f"{n}.low_rank_b": torch.zeros(out, rank, dtype=torch.bfloat16) for n, (out, _, rank) in layers.items()}
    write_adapter(branches_of(zeros, layers, -1, torch.bfloat16), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 3
    assert config["rank_pattern"] == config["alpha_pattern"] == {"model.layers.1.mlp.down_proj": 6}
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16} and len(tensors) == 2 * len(layers)
    names = {f"{name}.low_rank_{which}" for name in layers for which in "bp"}
    assert {branch_of_key(key) for key in tensors} == names and {key_of(name) for name in names} == set(tensors)
    assert branch_of_key("lora_A.weight") is None and branch_of_key("a.low_rank_b") is None
