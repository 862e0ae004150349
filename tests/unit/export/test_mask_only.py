from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from sparseforge_ds.checkpoint.tensors import TensorFolder, hash_tensor
from sparseforge_ds.cli.main import main
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.mask_only import MaskFolder, masked
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.verification import check_folder
from tests.sparse_folders import DTYPES, MODELS, ModelSource, bits, write_dense, write_sparse

QUERY = "model.layers.0.self_attn.q_proj.weight"


def write_mask(tmp_path: Path, family: str, dtype: str = "float32", pattern: str = "2:4") -> tuple[Path, Path]:
    """(dense, mask) folders; the mask is the source's."""
    dense = write_dense(tmp_path / "dense", family, dtype)
    source = ModelSource(MODELS[family](), dense, DTYPES[dtype], pattern)
    export(source, tmp_path / "mask", "mask")
    return dense, tmp_path / "mask"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "llama-odd", "qwen3", "mistral", "gpt2", "mixtral"])
def test_applied_to_the_dense_model_it_is_the_sparse_one(tmp_path: Path, family: str, dtype: str) -> None:
    """Nothing was trained here but the mask, so mask and dense model give the `hf` export, bit by bit."""
    dense, mask = write_mask(tmp_path, family, dtype)
    sparse = TensorFolder(write_sparse(tmp_path / "sparse", dense, family, dtype))
    assert main(["export", str(mask), str(tmp_path / "out"), "--model", str(dense), "--skip_proof"]) == 0
    out, original = TensorFolder(tmp_path / "out"), TensorFolder(dense)
    assert out.specs == original.specs and sparse.specs.keys() == out.specs.keys()
    masks = MaskFolder(mask)
    for name in out.specs:
        expected = original.read(name)
        if name in masks.prunable:
            expected = torch.where(masks.read(name), expected, 0.0)
        assert torch.equal(bits(out.read(name)), bits(expected))
        assert torch.equal(bits(out.read(name)), bits(sparse.read(name)))
    sparsity = json.loads((tmp_path / "out" / "sparsity.json").read_text())
    assert sparsity["pattern"] == "2:4" and sparsity["step"] == 7 and sparsity["dtype"] == dtype
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_nothing_of_the_trained_model_is_said_of_the_dense_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither of OUT nor of what is exported from it; the run's scores are of the weights that it trained."""
    dense, mask = write_mask(tmp_path, "llama")
    run = {"model": "owner/dense-1b", "tokens": 640000, "evaluation": {"text": "held_out", "loss": 2.0}}
    change_json(mask, lambda content: content.update(run=run))
    for source, out, more in ((mask, "out", ["--model", str(dense)]), (tmp_path / "out", "packed", [])):
        format = ["--format", "packed24"] if out == "packed" else []
        assert main(["export", str(source), str(tmp_path / out), "--skip_proof", *more, *format]) == 0
        said = capsys.readouterr().out
        assert "note: it is the mask of step 7 on the own weights of dense, not the model that was trained" in said
        sparsity = json.loads((tmp_path / out / "sparsity.json").read_text())
        assert sparsity["run"] == {"model": "owner/dense-1b"} and sparsity["source"]["mask_on"] == "dense"
        card = ModelCard.load(tmp_path / out / "README.md")
        assert "It is the mask of step 7 of a run on the dense model's own weights (`dense`), not the" in card.text
        assert card.data.base_model == "owner/dense-1b" and card.data.eval_results is None
        assert "## Evaluation" not in card.text and "## Training" not in card.text


@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:4", "block16"])
def test_one_bit_a_weight(tmp_path: Path, pattern: str) -> None:
    dense, mask = write_mask(tmp_path, "llama", pattern=pattern)
    content = json.loads((mask / "mask.json").read_text())
    tensors = load_file(mask / "mask.safetensors")
    source = ModelSource(MODELS["llama"](), dense, torch.float32, pattern)
    specs = [source.specs[name] for name in content["weights"]]
    assert sum(tensor.nbytes for tensor in tensors.values()) == sum(spec.nbytes for spec in specs) / 32
    assert content["proof"] == {"masks": "equal to the source's"}
    for name, entry in content["weights"].items():
        assert entry["sha256"] == hash_tensor(tensors[name])
        expected = source.read_mask(name)
        assert entry["shape"] == list(expected.shape)
        held = [tensors[name][at // 8] >> at % 8 & 1 for at in range(64)]
        assert held == expected.reshape(-1)[:64].int().tolist()


def test_sharded_dense_models(tmp_path: Path) -> None:
    dense, mask = write_mask(tmp_path, "llama")
    sharded = write_dense(tmp_path / "sharded", "llama", max_shard_size="20KB")
    assert not (sharded / "model.safetensors").exists()
    for name, of in (("one", dense), ("two", sharded)):
        assert main(["export", str(mask), str(tmp_path / name), "--model", str(of), "--skip_proof"]) == 0
    one, two = TensorFolder(tmp_path / "one"), TensorFolder(tmp_path / "two")
    assert all(torch.equal(bits(one.read(name)), bits(two.read(name))) for name in one.specs)


def test_a_dense_model_stored_without_the_outer_name(tmp_path: Path) -> None:
    """As the original GPT-2 is: h.0... for transformer.h.0..."""
    dense, mask = write_mask(tmp_path, "gpt2")
    path = dense / "model.safetensors"
    short = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    short["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()  # the causal mask, which old files carry
    save_file(short, path, {"format": "pt"})
    assert main(["export", str(mask), str(tmp_path / "out"), "--model", str(dense)]) == 0
    assert "transformer.h.0.attn.c_attn.weight" in TensorFolder(tmp_path / "out").specs


def test_from_a_folder_groups_with_fewer_non_zeros_are_filled_up(tmp_path: Path) -> None:
    dense = write_dense(tmp_path / "dense", "llama")
    model = MODELS["llama"]()
    with torch.no_grad():
        model.get_parameter(QUERY)[3, 8:12] = torch.tensor([0.0, 0.0, 0.0, 2.0])
        model.get_parameter(QUERY)[4, 8:12] = 0.0
    export(ModelSource(model, dense, torch.float32), tmp_path / "sparse", skip_proof=True)
    export(open_source(tmp_path / "sparse"), tmp_path / "mask", "mask")
    mask = MaskFolder(tmp_path / "mask").read(QUERY)
    assert mask[3, 8:12].tolist() == [True, False, False, True]
    assert mask[4, 8:12].tolist() == [True, True, False, False]


def test_what_a_chosen_dtype_rounds_to_zero_is_kept_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = write_sparse(tmp_path / "sparse", write_dense(tmp_path / "dense", "llama"), "llama")
    (sparse / "sparsity.json").unlink()
    tensors = load_file(sparse / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] *= 1e-6
    save_file(tensors, sparse / "model.safetensors", {"format": "pt"})
    source = open_source(sparse, dtype="float16")
    assert (source.read(name) != 0).sum() < (tensors[name] != 0).sum()
    assert torch.equal(source.read_mask(name), tensors[name] != 0)
    assert main(["export", str(sparse), str(tmp_path / "mask"), "--format", "mask", "--dtype", "float16"]) == 2
    assert "--dtype float16: a mask has no dtype; leave it out" in capsys.readouterr().err


def test_minus_zero_does_not_survive() -> None:
    value = masked(torch.tensor([-0.0, -1.0, -2.0]), torch.tensor([True, True, False]))
    assert torch.equal(bits(value), bits(torch.tensor([0.0, -1.0, 0.0])))


def test_other_dense_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, mask = write_mask(tmp_path, "llama")
    out = str(tmp_path / "out")
    write_dense(tmp_path / "gpt2", "gpt2")
    assert main(["export", str(mask), out, "--model", str(tmp_path / "gpt2")]) == 2
    assert "is a gpt2, the mask" in capsys.readouterr().err
    MODELS["llama"](hidden_size=64).save_pretrained(tmp_path / "wide")
    assert main(["export", str(mask), out, "--model", str(tmp_path / "wide")]) == 2
    assert f"{QUERY} is (64, 64) there, the mask" in capsys.readouterr().err
    MODELS["llama"](num_hidden_layers=1).save_pretrained(tmp_path / "short")
    assert main(["export", str(mask), out, "--model", str(tmp_path / "short")]) == 2
    assert "model.layers.1.self_attn.q_proj.weight is missing there" in capsys.readouterr().err
    whole = load_file(tmp_path / "dense" / "model.safetensors")
    integers = shutil.copytree(tmp_path / "dense", tmp_path / "integers")
    save_file(whole | {QUERY: whole[QUERY].to(torch.int32)}, integers / "model.safetensors", {"format": "pt"})
    assert main(["export", str(mask), out, "--model", str(integers)]) == 2
    assert f"{integers}: {QUERY} is stored as torch.int32, which transformers would cast" in capsys.readouterr().err
    assert main(["export", str(mask), out, "--model", str(tmp_path / "none")]) == 2
    assert main(["export", str(tmp_path / "dense"), out, "--model", str(tmp_path / "dense")]) == 2
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
def test_experts_may_be_fused_in_the_dense_model(tmp_path: Path, family: str) -> None:
    """Stored as transformers keeps them in memory."""
    dense, mask = write_mask(tmp_path, family)
    fused = write_dense(tmp_path / "fused", family, save_original_format=False)
    assert any(name.endswith(".experts.gate_up_proj") for name in TensorFolder(fused).specs)
    out = tmp_path / "out"
    assert main(["export", str(mask), str(out), "--model", str(fused), "--skip_proof"]) == 0
    expected, found = TensorFolder(write_sparse(tmp_path / "sparse", dense, family)), TensorFolder(out)
    assert found.specs == expected.specs
    assert all(torch.equal(bits(found.read(name)), bits(expected.read(name))) for name in expected.specs)
    assert check_folder(out).ok


def change_json(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / "mask.json").read_text())
    change(content)
    (folder / "mask.json").write_text(json.dumps(content))


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "format": (lambda content: content.update(format=2), "format 2, this version reads 1"),
    "pattern": (lambda content: content.update(pattern="2:x"), "unknown pattern"),
    "no pattern": (lambda content: content.pop("pattern"), "is damaged; export the mask again"),
    "weights": (lambda content: content.update(weights=[1]), "does not list the weights"),
    "run": (lambda content: content.update(run=["a"]), "run is damaged; export the mask again"),
    "one weight": (lambda content: content["weights"].pop(QUERY), "does not list the weights"),
    "shape": (
        lambda content: content["weights"][QUERY].update(shape=[32, "32"]),
        f"damaged weight, {{'name': '{QUERY}'",
    ),
    "axis": (lambda content: content["weights"][QUERY].update(input_axis=0), "lists a damaged weight"),
    "smaller": (lambda content: content["weights"][QUERY].update(shape=[32, 16]), "is (32, 32) there, the mask"),
    "hash": (lambda content: content["weights"][QUERY].update(sha256="0" * 64), f"the mask of {QUERY} has not"),
    "other pattern": (lambda content: content.update(pattern="2:8"), "is not 2:8; export the mask again"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_masks_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    dense, mask = write_mask(tmp_path, "llama")
    change, message = DAMAGES[damage]
    change_json(mask, change)
    assert main(["export", str(mask), str(tmp_path / "out"), "--model", str(dense), "--skip_proof"]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "mask"]


def test_changed_bytes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, mask = write_mask(tmp_path, "llama")
    content = bytearray((mask / "mask.safetensors").read_bytes())
    content[-1] ^= 1
    (mask / "mask.safetensors").write_bytes(content)
    assert main(["export", str(mask), str(tmp_path / "out"), "--model", str(dense), "--skip_proof"]) == 2
    assert "has not the sha256 that mask.json gives" in capsys.readouterr().err


def test_a_wrong_byte_does_not_pass_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseforge_ds.export import mask_only

    dense = write_dense(tmp_path / "dense", "llama")
    source = ModelSource(MODELS["llama"](), dense, torch.float32)
    original = mask_only.np.packbits
    monkeypatch.setattr(mask_only.np, "packbits", lambda bit, bitorder: original(bit[::-1], bitorder=bitorder))
    with pytest.raises(ValueError, match="the proof failed: the mask of"):
        export(source, tmp_path / "mask", "mask")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
