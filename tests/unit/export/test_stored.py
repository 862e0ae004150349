from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.cli.main import main
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.stored import StoredWeights
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.packed_format.packing import PACKED24, POSITIONS
from tests.conftest import ROOT
from tests.forked_interpreter import run_script
from tests.sparse_folders import bits, write_dense, write_sparse

pytest.importorskip("sparseforge_ds.extras.packed24", reason="transformers loads packed folders by it")

CASES = [
    ("llama", "float32"),
    ("llama", "bfloat16"),
    ("llama", "float16"),
    ("llama-tied", "bfloat16"),
    ("llama-odd", "bfloat16"),
    ("qwen3", "bfloat16"),
    ("mistral", "bfloat16"),
    ("gpt2", "float32"),
    ("gpt2", "bfloat16"),
    ("opt", "float16"),
    ("mixtral", "bfloat16"),
    ("qwen2_moe", "bfloat16"),
    ("qwen3_moe", "float32"),
    ("olmoe", "bfloat16"),
    ("deepseek_v3", "bfloat16"),
]


def pack(tmp_path: Path, family: str, dtype: str, **options: Any) -> tuple[Path, Path]:
    """(sparse, packed) folders."""
    dense = write_dense(tmp_path / "dense", family, dtype)
    sparse = write_sparse(tmp_path / "sparse", dense, family, dtype)
    export(open_source(sparse), tmp_path / "packed", "packed24", skip_proof=True, **options)
    return sparse, tmp_path / "packed"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(16)[None]).logits


@pytest.mark.parametrize(("family", "dtype"), CASES)
@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
def test_transformers_loads_it_and_it_is_the_dense_model(
    tmp_path: Path, family: str, dtype: str, max_shard_size: str
) -> None:
    sparse, packed = pack(tmp_path, family, dtype, max_shard_size=max_shard_size)
    assert (packed / "model.safetensors").exists() == (max_shard_size == "5GB")
    expected = AutoModelForCausalLM.from_pretrained(sparse)
    model, report = AutoModelForCausalLM.from_pretrained(packed, output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == expected.dtype == getattr(torch, dtype)
    model.dequantize()
    state = model.state_dict()
    assert all(torch.equal(bits(state[name]), bits(value)) for name, value in expected.state_dict().items())
    assert torch.equal(bits(logits(model)), bits(logits(expected)))
    assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")
    assert not model.is_quantized and all(not m.config._is_quantized for m in model.modules() if hasattr(m, "config"))
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in model.parameters())


def test_a_packed_bf16_weight_has_9_16_of_the_bytes(tmp_path: Path) -> None:
    sparse, packed = (TensorFolder(folder) for folder in pack(tmp_path, "llama", "bfloat16"))
    name = "model.layers.0.mlp.down_proj.weight"
    assert packed.specs[name].nbytes + packed.specs[name + POSITIONS].nbytes == 0.5625 * sparse.specs[name].nbytes


def test_a_dequantized_model_is_saved_as_an_ordinary_one(tmp_path: Path) -> None:
    sparse, packed = pack(tmp_path, "qwen3", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(packed)
    model.dequantize()
    model.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    first = load_file(sparse / "model.safetensors")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert first.keys() == again.keys()
    assert all(torch.equal(bits(first[name]), bits(again[name])) for name in first)


def test_a_packed_folder_loads_in_the_callers_dtype(tmp_path: Path) -> None:
    sparse, packed = pack(tmp_path, "llama", "float32")
    expected = AutoModelForCausalLM.from_pretrained(sparse, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(bits(logits(model)), bits(logits(expected)))


def test_transformers_loads_it_with_us_and_raises_alone(tmp_path: Path) -> None:
    """It ignores a quant_method that it does not know: only the shapes keep it from random weights. Once our package is
    imported, after it too, it loads the same folders, and DeepSpeed is not needed for that."""
    folders = [str(pack(tmp_path / family, family, "bfloat16")[1]) for family in ("llama", "gpt2")]
    code = """
import sys
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except RuntimeError as error:
        print(f"refused: {error}")
import sparseforge_ds.extras.packed24
for folder in sys.argv[1:]:
    AutoModelForCausalLM.from_pretrained(folder)
    print("loaded")
assert "deepspeed" not in sys.modules
"""
    done = run_script(code, *folders, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (done.stdout.count("refused: "), done.stdout.count("loaded")) == (2, 2), done.stdout
    assert PACKED24 in done.stderr


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("change", [{"format": 2}, {"groups": 8}, {"semi_structured": "yes"}])
def test_another_version_of_the_format_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    _, packed = pack(tmp_path, "llama", "bfloat16")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] |= change
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="upgrade it, or export again"):
        AutoModelForCausalLM.from_pretrained(packed)
    if "format" in change:
        with pytest.raises(ValueError, match="config.json: quantization_config has format 2, and this version"):
            check_folder(packed)


@pytest.mark.parametrize(("family", "dtype"), [("llama-odd", "float16"), ("gpt2", "bfloat16")])
def test_packed_weights_are_read_without_a_model(tmp_path: Path, family: str, dtype: str) -> None:
    sparse, packed = pack(tmp_path, family, dtype)
    expected = TensorFolder(sparse)
    stored = stored_in(packed)
    assert stored.packed and stored.specs == expected.specs
    assert all(torch.equal(bits(stored.read(name)), bits(expected.read(name))) for name in expected.specs)


def stored_in(folder: Path) -> StoredWeights:
    return StoredWeights(folder, json.loads((folder / "config.json").read_text()))


def test_reading_a_damaged_weight_names_it(tmp_path: Path) -> None:
    _, packed = pack(tmp_path, "llama", "float32")
    edit(packed, lambda tensors: tensors[QUERY + POSITIONS].fill_(0))
    with pytest.raises(ValueError, match=f"{packed}: {QUERY}: positions of a packed weight are damaged"):
        stored_in(packed).read(QUERY)
    edit(packed, lambda tensors: tensors.update({QUERY: tensors[QUERY][:-2].contiguous()}))
    with pytest.raises(ValueError, match=f"{QUERY}: values of shape"):
        stored_in(packed)


def test_a_dtype_that_no_packed_weight_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, packed = pack(tmp_path, "llama", "float32")
    for key, dtype, message in (
        (QUERY, torch.int8, "values of a packed weight are float64, float32, bfloat16 or float16, these are"),
        (QUERY, torch.bool, "values of a packed weight are float64, float32, bfloat16 or float16, these are"),
        (QUERY + POSITIONS, torch.float32, "positions of a packed weight are uint8, these are"),
    ):
        sound = load_file(packed / "model.safetensors")[key]
        edit(packed, lambda tensors, key=key, dtype=dtype: tensors.update({key: tensors[key].to(dtype)}))
        assert main(["verify", str(packed)]) == 2
        assert f"{packed}: {QUERY}: {message} {dtype}" in capsys.readouterr().err
        edit(packed, lambda tensors, key=key, sound=sound: tensors.update({key: sound}))


def test_other_patterns_are_refused(tmp_path: Path) -> None:
    dense = write_dense(tmp_path / "dense", "llama")
    sparse = write_sparse(tmp_path / "sparse", dense, "llama", pattern="4:8")
    with pytest.raises(ValueError, match="the packed24 format holds 2:4, the pattern here is 4:8; use --format hf"):
        export(open_source(sparse), tmp_path / "packed", "packed24")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "sparse"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_cuda_linear_weights_are_semi_structured(tmp_path: Path, dtype: str) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    from torch.sparse import SparseSemiStructuredTensor

    sparse, packed = pack(tmp_path, "llama", dtype)
    ask_for_semi_structured(packed)
    expected = AutoModelForCausalLM.from_pretrained(sparse, device_map="cuda")
    model = AutoModelForCausalLM.from_pretrained(packed, device_map="cuda")
    layers = model.model.layers
    assert isinstance(layers[0].mlp.down_proj.weight, SparseSemiStructuredTensor)
    assert type(model.lm_head.weight) is nn.Parameter
    ids = torch.arange(32, device="cuda")[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "again")
    model.dequantize()
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())
    shutil.rmtree(tmp_path / "again", ignore_errors=True)
    model.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "llama-odd", "gpt2", "qwen3_moe"])
def test_on_cuda_packed_weights_are_multiplied_as_they_are(tmp_path: Path, family: str) -> None:
    sparse, packed = pack(tmp_path, family, "bfloat16")
    expected = AutoModelForCausalLM.from_pretrained(sparse, device_map="cuda")
    model = AutoModelForCausalLM.from_pretrained(packed, device_map="cuda")
    for tokens in (1, 7, 16):
        ids = torch.arange(tokens, device="cuda")[None]
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=2e-2, atol=2e-2)
    model.dequantize()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.state_dict().items())


def ask_for_semi_structured(packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["semi_structured"] = True
    (packed / "config.json").write_text(json.dumps(config))


@pytest.mark.gpu
def test_on_cuda_conv1d_is_dense(tmp_path: Path) -> None:
    sparse, packed = pack(tmp_path, "gpt2", "bfloat16")
    ask_for_semi_structured(packed)
    expected = AutoModelForCausalLM.from_pretrained(sparse, device_map="cuda")
    model = AutoModelForCausalLM.from_pretrained(packed, device_map="cuda")
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.state_dict().items())
