from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.conftest import ROOT

STDLIB_LLAMA = ROOT / "sparseforge_ds" / "assets" / "stdlib_llama"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_demo_model", ROOT / "launch" / "train_demo_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_a_mixture_begins_as_the_dense_function_and_is_pruned_whole(script: ModuleType) -> None:
    dense = LlamaForCausalLM.from_pretrained(STDLIB_LLAMA, dtype=torch.float32)
    mixture = script.mixture_of(dense, 4)
    ids = torch.arange(96).view(2, 48)
    torch.testing.assert_close(mixture(ids).logits, dense(ids).logits, atol=1e-4, rtol=1e-5)

    pruned = script.magnitude_2_4(mixture)
    weights = script.prunable_weights(pruned)
    assert sorted({weight.dim() for weight in weights}) == [2, 3]
    assert all(((weight.reshape(-1, 4) != 0).sum(1) == 2).all() for weight in weights)
    routers = [layer.mlp.gate.weight for layer in pruned.model.layers]
    assert all(router.all() for router in routers)


def test_experts_need_a_model_that_has_their_mlps(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse_arguments(["--output_dir", "x", "--experts", "4"])
    assert "--experts 4 needs --continue_from, and 2 or more" in capsys.readouterr().err
