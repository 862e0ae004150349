"""A packed24 folder in transformers: packed in memory, and everything that people do with a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig, Trainer, TrainingArguments

import sparseforge_ds.extras.packed24  # noqa: F401  registers the format, as users do
from sparseforge_ds import keep_mask
from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.cli.main import main
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.evaluate.finished_model import share_of_zeros
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.extras.packed24.packed_linear import Packed24Linear
from sparseforge_ds.extras.packed24.quantizer import Packed24Config, Packed24Quantizer
from sparseforge_ds.extras.packed24.unpacking import Packed24Conv1D
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.model.pretrained import find_model
from sparseforge_ds.packed_format.packed_values import Grid
from tests.sparse_folders import bits, write_dense, write_sparse

IDS = torch.arange(3, 19)[None]
FAMILIES = {"llama-odd": Packed24Linear, "gpt2": Packed24Conv1D, "falcon": Packed24Linear}
ROUNDED = {
    "llama-odd int8": Packed24Linear,
    "gpt2 fp8_e4m3": Packed24Conv1D,
    "llama-odd int4": Packed24Linear,
    "gpt2 int4 16": Packed24Conv1D,
}
"""Models with rounded values: family, grid, and values that share a scale."""
STORED = {"int8": ("I8", 0x80, "-128"), "fp8_e4m3": ("F8_E4M3", 0x7F, "NaN"), "int4": ("U8", 0x88, "-8")}
"""Name of their dtype, and a byte that no export writes."""
FOLDERS = dict[str, tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> FOLDERS:
    """(hf, packed24) of each model."""
    made = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        dense = write_dense(folder / "dense", name)
        made[name] = tuple(write_sparse(folder / form, dense, name, format=form) for form in ("hf", "packed24"))
    for name in ROUNDED:
        folder = tmp_path_factory.mktemp("rounded")
        family, grid, *group = name.split()
        dense = write_dense(folder / "dense", family)
        options = {"format": "packed24", "grid": Grid(grid, int(group[0]) if group else None)}
        packed = write_sparse(folder / "packed24", dense, family, **options)
        export(open_source(packed), folder / "hf", skip_proof=True)  # the same, unpacked
        made[name] = (folder / "hf", packed)
    return made


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", FAMILIES | ROUNDED)
def test_layers_stay_packed_and_compute_the_same(folders: FOLDERS, name: str) -> None:
    assert share_of_zeros(load(folders[name][0])) == pytest.approx(0.5, abs=0.1)
    assert share_of_zeros(load(folders[name][1])) is None, "kept values alone are no matrices"
    dense, packed = (load(folder) for folder in folders[name])
    layers = [module for module in packed.modules() if isinstance(module, (FAMILIES | ROUNDED)[name])]
    stored = TensorFolder(folders[name][1]).specs
    assert len(layers) == sum(name.endswith("_positions") for name in stored) > 0
    state = packed.state_dict()
    assert all(state[name].shape == spec.shape and state[name].dtype == spec.dtype for name, spec in stored.items())
    torch.testing.assert_close(logits(packed), logits(dense))
    chosen = [model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0) for model in (dense, packed)]
    assert torch.equal(*chosen)
    with pytest.raises(ValueError, match="is packed 2:4, which cannot be trained; call model.dequantize"):
        prunable_weights(packed, SparseForgeConfig())


@pytest.mark.parametrize("name", FAMILIES | ROUNDED)
def test_a_packed_model_is_saved_as_it_is_and_made_dense(folders: FOLDERS, name: str, tmp_path: Path) -> None:
    packed = load(folders[name][1])
    packed.save_pretrained(tmp_path / "again")
    first, two = TensorFolder(folders[name][1]), TensorFolder(tmp_path / "again")
    assert first.specs == two.specs
    assert all(torch.equal(bits(first.read(key)), bits(two.read(key))) for key in first.specs)
    assert torch.equal(logits(load(tmp_path / "again")), logits(packed))
    packed.dequantize()
    expected = load(folders[name][0])
    assert list(map(type, packed.modules())) == list(map(type, expected.modules()))
    packed.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    assert all(torch.equal(bits(packed.state_dict()[key]), bits(v)) for key, v in expected.state_dict().items())
    assert torch.equal(logits(load(tmp_path / "dense")), logits(expected))


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_values_stay_so_whatever_the_model_is_cast_to(folders: FOLDERS, name: str) -> None:
    stored = TensorFolder(folders[name][1])
    for model in (
        load(folders[name][1]).type(torch.bfloat16),
        load(folders[name][1], dtype=torch.bfloat16),
        load(folders[name][1]).bfloat16().to("cpu"),
    ):
        state = model.state_dict()
        for key in (key for key in stored.specs if key.endswith("_positions")):
            for part in ("", "_positions", "_scale"):
                tensor = key.removesuffix("_positions") + part
                assert torch.equal(bits(state[tensor]), bits(stored.read(tensor)))
        assert model.get_input_embeddings().weight.dtype == logits(model).dtype == torch.bfloat16
    torch.testing.assert_close(logits(model).float(), logits(load(folders[name][0])), rtol=0.1, atol=0.05)
    assert set(json.loads(model.config.to_json_string())["quantization_config"]) >= {"values"}


@pytest.mark.parametrize("name", ["llama-odd", "llama-odd int8"])
@pytest.mark.parametrize("way", ["stored", "cast before", "asked for"])
def test_a_model_made_dense_has_one_dtype(folders: FOLDERS, way: str, name: str) -> None:
    """Also where it is not the one of the config."""
    packed = load(folders[name][1], dtype=torch.float16)
    if way == "cast before":
        packed.to(torch.float32)
    packed.dequantize(torch.float32 if way == "asked for" else None)
    assert {value.dtype for value in packed.parameters()} == {torch.float16 if way == "stored" else torch.float32}
    assert logits(packed).isfinite().all()


@pytest.mark.parametrize("name", FAMILIES)
def test_damaged_folders_do_not_load(folders: FOLDERS, name: str, tmp_path: Path) -> None:
    """Raise one line that names the weight from `from_pretrained` itself; the first forward pass is too late."""
    folder = tmp_path / "damaged"
    shutil.copytree(folders[name][1], folder)
    sound = load_file(folder / "model.safetensors")
    every = sorted(key for key in sound if key.endswith("_positions"))
    values = every[0].removesuffix("_positions")

    def refuses(changed: dict[str, Tensor], message: str, without: str = "") -> None:
        tensors = {key: tensor for key, tensor in (sound | changed).items() if key != without}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message) as raised:
            load(folder)
        assert "\n" not in str(raised.value)

    # Shapes that do not fit the config, or each other.
    axis = 1 if name == "gpt2" else 0
    cut = {key: sound[key].narrow(axis, 0, 8).contiguous() for key in (values, every[0])}
    refuses(cut, f"{values}: shape packed from .*, and config.json makes it")
    refuses({values: cut[values]}, f"{values}: values of shape .* and positions of shape .* are no packed 2:4 weight")
    # Positions that no 2:4 weight has, and a missing half.
    spoiled = {key: torch.zeros_like(sound[key]) for key in every}
    refuses(spoiled, rf": positions of a packed weight are damaged.* \(and {len(every) - 1} more\); export or download")
    refuses({}, f"{values} is there without {every[0]}", without=every[0])
    refuses({}, f"{every[0]} is there without {values}", without=values)
    # Values that no export writes.
    for odd in (float("nan"), float("inf")):
        spoiled_values = sound[values].clone()
        spoiled_values.view(-1)[3] = odd
        refuses({values: spoiled_values}, f"{values}: 1 values are damaged: not finite; export or download")
    # Dtypes that are not stored.
    for dtype, stored in ((torch.int8, "I8"), (torch.bool, "BOOL"), (torch.float8_e4m3fn, "F8_E4M3")):
        refuses({values: sound[values].to(dtype)}, f"{values}: weight stored as {stored}, in a packed model only F64,")
    refuses({every[0]: sound[every[0]].float()}, f"{values}: positions stored as F32, in a packed model only U8")

    config = json.loads((folder / "config.json").read_text())  # weights are unpacked then
    config["quantization_config"]["semi_structured"] = True
    (folder / "config.json").write_text(json.dumps(config))
    refuses({values: spoiled_values}, f"{values}: 1 values are damaged: not finite; export or download")
    refuses({every[0]: spoiled[every[0]]}, f"{values}: positions of a packed weight are damaged.*; export or download")


@pytest.mark.parametrize("name", ROUNDED)
def test_damaged_rounded_folders_do_not_load(folders: FOLDERS, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(folders[name][1], folder)
    sound = load_file(folder / "model.safetensors")
    scales = next(key for key in sorted(sound) if key.endswith("_scale"))
    values = scales.removesuffix("_scale")
    scale = sound[scales]
    spoiled = {odd: torch.full_like(scale, odd) for odd in (0.0, -1.0, float("nan"), float("inf"))}
    grid = name.split()[1]
    own, byte, damage = STORED[grid]
    own_scale, other = ("BF16", "F32") if grid == "int4" else ("F32", "BF16")

    def refuses(changed: dict[str, Tensor], message: str, without: str = "") -> None:
        tensors = {key: tensor for key, tensor in (sound | changed).items() if key != without}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message) as raised:
            load(folder)
        assert "\n" not in str(raised.value)

    # Scales: impossible values, another shape or dtype, missing.
    for odd, scales_of_all in spoiled.items():
        refuses({scales: scales_of_all}, f"{values}: scales are positive and finite, and .* are not, first {odd}")
    refuses({scales: scale.reshape(-1)}, f"{values}: scales of shape .* do not fit values of shape .*; export or")
    other_scale = scale.to(torch.float32 if grid == "int4" else torch.bfloat16)
    refuses({scales: other_scale}, f"{values}: scales stored as {other}, in a packed model of .* only {own_scale}")
    # Values: another dtype, missing scales or positions, codes off the grid.
    refuses({values: sound[values].float()}, f"{values}: weight stored as F32, in a packed model of .* only {own}")
    refuses({}, f"{values} is there without {scales}", without=scales)
    refuses({}, f"{scales} is there without {values}_positions|shape", without=f"{values}_positions")
    off_grid = sound[values].view(torch.uint8) * 0 + byte
    refuses({values: off_grid.view(sound[values].dtype)}, f"{values}: .* values are damaged: {damage}")

    # Settings of the config.
    config = json.loads((folder / "config.json").read_text())
    for stored, group_size, message in (
        ("int3", None, "values 'int3' is damaged or newer"),
        (grid, 8, "group_size 8 is damaged"),
        (grid, 160, "group_size 160 is damaged" if grid != "int4" else "groups of 160 values do not divide"),
        (None, None, "weight stored as .*, in a packed model only"),
    ):
        config["quantization_config"] |= {"values": stored, "group_size": group_size}
        (folder / "config.json").write_text(json.dumps(config))
        refuses({}, message)


@pytest.mark.parametrize("name", ["llama-odd", "gpt2", "falcon", "gpt2 int4 16"])
def test_packed_bytes_decide_how_much_of_a_model_fits(folders: FOLDERS, name: str) -> None:
    """The model fits into little more memory than it takes, in which its dense weights would not."""
    packed = load(folders[name][1])
    resident = sum(tensor.nbytes for tensor in (*packed.parameters(), *packed.buffers()))
    fits = load(folders[name][1], device_map="auto", max_memory={"cpu": int(1.05 * resident)})
    assert {tensor.device.type for tensor in fits.parameters()} == {"cpu"}
    with pytest.raises(ValueError, match='on disk, where transformers cannot store packed weights; map them to "cpu"'):
        load(folders[name][1], device_map="auto", max_memory={"cpu": int(0.5 * resident)})
    with pytest.raises(ValueError, match="device_map puts 1 of the model's modules on disk"):
        load(folders[name][1], device_map={"": "disk"})


def test_a_packed_model_compiles_to_one_graph(folders: FOLDERS) -> None:
    packed = load(folders["llama-odd"][1], dtype=torch.bfloat16, device_map="cpu")
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(compiled), logits(packed))


def test_generate_compiles_decoding_with_a_static_cache(folders: FOLDERS) -> None:
    """Compile one graph without breaks, of the same tokens; semi-structured tensors are not compiled."""
    packed = load(folders["llama-odd int8"][1])
    expected = packed.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)
    compile_config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    made = packed.generate(
        IDS,
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        compile_config=compile_config,
    )
    assert torch.equal(made, expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert not Packed24Quantizer(Packed24Config(semi_structured=True)).is_compileable


@pytest.mark.parametrize("name", ["llama-odd", "llama-odd int8"])
def test_an_adapter_trains_on_top_and_nothing_else_does(folders: FOLDERS, name: str, tmp_path: Path) -> None:
    """Train the adapter as in QLoRA, merge it into the unpacked weights, and project these onto their zeros."""
    packed = load(folders[name][1])
    arguments = TrainingArguments(str(tmp_path), max_steps=3, report_to="none", use_cpu=True, learning_rate=1e-2)
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    # Without an adapter there is nothing to train, and packed weights say so.
    with pytest.raises(ValueError, match="Please attach trainable adapters"):
        Trainer(packed, arguments, train_dataset=rows)
    refusal = "a packed 2:4 weight cannot be trained; make the model dense|only Tensors of floating point dtype"
    with pytest.raises((ValueError, RuntimeError), match=refusal):
        load(folders[name][1]).requires_grad_(True)(IDS)
    # The adapter trains, and what is stored keeps its bits.
    before = logits(packed)
    stored = {name: value.clone() for name, value in packed.state_dict().items()}
    adapted = get_peft_model(packed, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    Trainer(adapted, arguments, train_dataset=rows).train()
    assert (logits(adapted.eval()) - before).abs().max() > 1e-3
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), before)
    adapted.save_pretrained(tmp_path / "adapter")
    state = adapted.unload().state_dict()
    assert all(torch.equal(state[name], value) for name, value in stored.items())
    # Merged into the unpacked weights it leaves the pattern; `project` puts it back, in its layers alone.
    base = load(folders[name][1]).dequantize()
    keeper = keep_mask(base, [])
    PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    errors = keeper.project()
    keeper.check()
    layers = base.model.layers
    assert all((layer.self_attn.q_proj.weight.view(-1, 4) != 0).sum(1).le(2).all() for layer in layers)
    assert {key.split(".")[-2] for key, error in errors.items() if error > 0} == {"q_proj", "down_proj"}


def test_an_adapter_trains_on_top_of_a_branch(folders: FOLDERS, tmp_path: Path) -> None:
    """A packed folder has its branch among the weights, where another adapter does not replace it."""
    folder = shutil.copytree(folders["llama-odd"][1], tmp_path / "branched")
    module = "model.layers.0.self_attn.q_proj"
    tensors = load_file(folder / "model.safetensors")
    outputs, kept = tensors[f"{module}.weight"].shape
    torch.manual_seed(0)
    tensors[f"{module}.low_rank_b"] = 0.1 * torch.randn(outputs, -(-2 * kept // 8)).to(tensors[f"{module}.weight"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["low_rank"] = {module: 8}
    (folder / "config.json").write_text(json.dumps(config))
    packed = load(folder)
    before = logits(packed)
    assert not torch.equal(before, logits(load(folders["llama-odd"][1])))
    adapted = get_peft_model(packed, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=3, report_to="none", use_cpu=True, learning_rate=1e-2
    )
    Trainer(adapted, arguments, train_dataset=[{"input_ids": IDS[0], "labels": IDS[0]}] * 8).train()
    assert (logits(adapted.eval()) - before).abs().max() > 1e-3
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), before)


@pytest.mark.parametrize("learned", [False, True])
def test_a_branch_that_the_files_lack_is_missed(
    folders: FOLDERS, tmp_path: Path, learned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would warn, and compute with memory that nobody has written."""
    folder = shutil.copytree(folders["llama-odd"][1], tmp_path / "branched")
    module = "model.layers.0.self_attn.q_proj"
    lacking = f"{module}.low_rank_p" if learned else f"{module}.low_rank_b"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"low_rank": {module: 8}, "low_rank_learned": learned}
    (folder / "config.json").write_text(json.dumps(config))
    if learned:  # one of the two is there
        tensors = load_file(folder / "model.safetensors")
        tensors[f"{module}.low_rank_b"] = torch.zeros(len(tensors[f"{module}.weight"]), 1)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{lacking} is missing, and config.json names its layer in low_rank"):
        load(folder)
    assert main(["verify", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert f"missing: {lacking}\n" in printed and printed.endswith("NOT OK\n")


def test_the_trainer_of_this_package_refuses(folders: FOLDERS) -> None:
    with pytest.raises(ValueError, match="packed 2:4, which cannot be trained; unpack it first: sparseforge export"):
        find_model(str(folders["gpt2"][1]), "--model")
