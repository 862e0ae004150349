"""Mixtures of every family from a packed24 folder: their experts stay packed, and compute what dense ones do."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import sparseforge_ds.extras.packed24  # noqa: F401  registers the format, as users do
from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.extras.packed24 import merged_experts
from sparseforge_ds.extras.packed24.packed_experts import Packed24Experts
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.packed_format.packed_values import SCALE, Grid
from sparseforge_ds.packed_format.packing import POSITIONS
from tests.sparse_folders import bits, write_dense, write_sparse
from tests.tiny_models import MIXTURES

IDS = torch.arange(3, 35).view(2, 16)


def folders(
    folder: Path, family: str, dtype: str = "float32", grid: str | None = None, group: int | None = None
) -> tuple[Path, Path]:
    """(hf, packed24)."""
    dense = write_dense(folder / "dense", family, dtype)
    if grid is not None:
        packed = write_sparse(folder / "packed24", dense, family, dtype, format="packed24", grid=Grid(grid, group))
        export(open_source(packed), folder / "hf", skip_proof=True)  # the same, unpacked
        return folder / "hf", packed
    hf, packed = (write_sparse(folder / form, dense, family, dtype, format=form) for form in ("hf", "packed24"))
    return hf, packed


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def experts_of(model: nn.Module) -> dict[str, Packed24Experts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Packed24Experts)}


@pytest.mark.parametrize(
    ("family", "grid", "group"),
    [
        *((family, None, None) for family in MIXTURES),
        ("qwen3_moe", "int8", None),
        ("gpt_oss", "fp8_e4m3", None),
        ("llama4_text", "int8", None),
        ("qwen3_moe", "int4", None),
        ("gpt_oss", "int4", 16),
        ("llama4_text", "int4", 16),
        ("mixtral", "int4", 16),
    ],
)
def test_packed_experts_of_a_family_compute_as_dense_ones(
    tmp_path: Path, family: str, grid: str | None, group: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    hf, folder = folders(tmp_path, family, grid=grid, group=group)
    dense, packed = load(hf), load(folder, device_map="cpu")
    # All experts stay packed, and take the bytes that the format promises.
    assert "unpacked" not in caplog.text
    of_dense = {name: parameter for name, parameter in dense.named_parameters() if parameter.ndim == 3}
    of_packed = {name: packed.get_parameter(name) for name in of_dense if "conv" not in name}
    assert len(experts_of(packed)) * 2 == len(of_packed) > 0
    for name, values in of_packed.items():
        positions = packed.get_buffer(name + POSITIONS)
        bytes_of_value = {None: 4, "int4": 0.5}.get(grid, 1)
        assert values.nbytes + positions.nbytes == of_dense[name].numel() * (bytes_of_value / 2 + 1 / 8)
        assert not values.requires_grad
        if group is not None:  # the rows of down_proj have two
            assert packed.get_buffer(name + SCALE).numel() * 2 * group == of_dense[name].numel()
    # They compute what the dense experts do.
    torch.testing.assert_close(logits(packed), logits(dense), rtol=0, atol=1e-5)
    chosen = [model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0) for model in (dense, packed)]
    assert torch.equal(*chosen)
    # So do copies, also those in a file.
    torch.save(packed, tmp_path / "packed.pt")
    for copied in (copy.deepcopy(packed), torch.load(tmp_path / "packed.pt", weights_only=False)):
        assert torch.equal(logits(copied), logits(packed)) and experts_of(copied).keys() == experts_of(packed).keys()
    # What is packed is refused for training.
    with pytest.raises(ValueError, match="is packed 2:4, which cannot be trained; call model.dequantize"):
        prunable_weights(packed, SparseForgeConfig())

    # Saved again, every tensor has the same bits.
    packed.save_pretrained(tmp_path / "again")
    original, again = TensorFolder(folder), TensorFolder(tmp_path / "again")
    assert original.specs == again.specs
    assert all(torch.equal(bits(original.read(key)), bits(again.read(key))) for key in original.specs)

    # Made dense, the model is the dense one, bit for bit.
    packed.dequantize()
    state = packed.state_dict()
    assert not experts_of(packed) and state.keys() == dense.state_dict().keys()
    assert all(torch.equal(bits(state[key]), bits(value)) for key, value in dense.state_dict().items())
    assert torch.equal(logits(packed), logits(dense))


def test_packed_experts_compile_to_one_graph_and_train_an_adapter(tmp_path: Path) -> None:
    """Pass the adapter's gradient through the experts; they themselves are refused one."""
    _, folder = folders(tmp_path, "gpt_oss", "bfloat16")
    packed = load(folder)
    torch.compiler.reset()  # a limit of recompilations counts those of other models
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled), logits(packed))
    before = logits(packed)
    stored = {name: value.clone() for name, value in packed.state_dict().items()}
    adapted = get_peft_model(packed, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian"))
    adapted(IDS, labels=IDS).loss.backward()
    for name, parameter in adapted.named_parameters():
        assert (parameter.grad is not None) == ("lora" in name)
        assert "lora_B" not in name or parameter.grad.any()
    assert torch.equal(logits(adapted.unload()), before)
    assert all(torch.equal(packed.state_dict()[name], value) for name, value in stored.items())
    for experts in experts_of(packed).values():
        experts.down_proj.requires_grad_(True)
    with pytest.raises(ValueError, match="packed 2:4 experts cannot be trained"):
        packed(IDS)


def test_experts_that_cannot_stay_packed_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hf, folder = folders(tmp_path, "qwen3_moe")
    monkeypatch.setattr(merged_experts, "packed_kind", lambda experts: None)
    with caplog.at_level(logging.WARNING, "sparseforge_ds"):
        packed = load(folder)
    assert [record.message for record in caplog.records] == [
        "model.layers.1.mlp.experts: experts are unpacked, since Qwen3MoeExperts has a way of its own to compute them; "
        "0.0246 MB of memory in place of 0.0131"
    ]
    assert not experts_of(packed)
    torch.testing.assert_close(logits(packed), logits(load(hf)))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_damaged_folders_do_not_load(tmp_path: Path, family: str) -> None:
    """Raise one line that names the weight, from `from_pretrained` itself."""
    _, folder = folders(tmp_path, family)
    sound = load_file(folder / "model.safetensors")
    positions = next(name for name in sound if ".experts." in name and name.endswith(POSITIONS) and "down" in name)
    values = positions.removesuffix(POSITIONS)
    norm = "model.norm.weight"

    def refuses(changed: dict[str, Tensor], message: str, without: str = "") -> None:
        tensors = {key: tensor for key, tensor in (sound | changed).items() if key != without}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message) as raised:
            load(folder)
        assert "\n" not in str(raised.value)

    # Positions, a missing half, and dtypes that are not stored.
    refuses({positions: torch.zeros_like(sound[positions])}, "down_proj, expert 0: positions .* damaged.* export or")
    refuses({}, f"{positions} is there without {values}", without=values)
    refuses({}, f"{values} is there without {positions}", without=positions)
    refuses({values: sound[values].to(torch.int8)}, f"{values}: weight stored as I8, in a packed model only F64, F32")
    refuses({positions: sound[positions].float()}, f"{positions.removesuffix(POSITIONS)}: positions stored as F32")
    refuses({norm: sound[norm].to(torch.int64)}, f"{norm}: weight stored as I64")
    # A part of the values and their positions.
    cut = {name: sound[name][..., :2].contiguous() for name in (values, positions)}
    refuses(cut, f"{values}:.*shape")
    # Listed experts are merged when they are loaded: one of them is gone.
    if family == "qwen3_moe":
        last = max(name for name in sound if "down_proj" in name and ".experts." in name)
        rest = {name for name in sound if name.startswith(last.rpartition("down_proj")[0])}
        for name in rest:
            del sound[name]
        refuses({}, r"mlp.experts.\w+: has shape .3, .*, not .4, ")


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_damaged_scales_do_not_load(tmp_path: Path, family: str) -> None:
    _, folder = folders(tmp_path, family, grid="int8")
    sound = load_file(folder / "model.safetensors")
    scales = next(name for name in sound if ".experts." in name and name.endswith(SCALE) and "down" in name)
    for odd in (0.0, -1.0, float("nan")):
        save_file(sound | {scales: torch.full_like(sound[scales], odd)}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match="down_proj, expert 0: scales are positive and finite, and .* export or"):
            load(folder)
