"""2:4 folders that we did not write: pruned in place and saved by transformers, without a sparsity.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from sparseforge_ds.cli.main import main
from sparseforge_ds.export import folder_source
from sparseforge_ds.export.folder_source import FolderSource
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.reference import filled_model
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.extras.packed24 import register_format
from sparseforge_ds.mask.pattern import NM, top_n
from tests.sparse_folders import bits, write_dense, write_sparse
from tests.tiny_models import seeing_llava, seeing_qwen3_5

DOWN = "model.layers.0.mlp.down_proj.weight"


def prune(folder: Path, names: list[str], axis: int = -1) -> dict[str, Tensor]:
    """Magnitude 2:4 as Wanda's code does it, by a product with the mask: half of the pruned entries become -0.0."""
    tensors = load_file(folder / "model.safetensors")
    for name in names:
        weight = tensors[name]
        pattern = NM(2, 4)
        group_GM = pattern.to_groups(weight.reshape(-1), tuple(weight.shape), axis)
        mask = pattern.from_groups(top_n(group_GM.abs(), 2), tuple(weight.shape), axis).view(weight.shape)
        tensors[name] = (weight * mask).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_a_folder_from_elsewhere_can_be_packed(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_dense(tmp_path / "elsewhere", family, "bfloat16")
    names = [row.name for row in check_folder(tmp_path / "elsewhere", NM(2, 4)).rows]
    tensors = prune(tmp_path / "elsewhere", names, -2 if family == "gpt2" else -1)
    assert any((tensors[name].signbit() & (tensors[name] == 0)).any() for name in names)

    out = tmp_path / "packed"
    assert main(["export", str(tmp_path / "elsewhere"), str(out), "--format", "packed24", "--skip_proof"]) == 0
    assert f"{len(names)} weights in 2:4" in capsys.readouterr().out
    assert main(["verify", str(out)]) == 0
    again = open_source(out)
    assert set(again.prunable) == set(names) and again.specs.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(bits(again.read(name)), bits(value + 0.0 if name in names else value))
    assert json.loads((out / "sparsity.json").read_text())["source"] == {"folder": "elsewhere"}


def test_what_transformers_does_not_load_is_neither_checked_nor_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers behind the last one, `mtp` and buffers of older versions."""
    folder = write_dense(tmp_path / "elsewhere", "llama")
    prune(folder, [row.name for row in check_folder(folder, NM(2, 4)).rows])
    stored = load_file(folder / "model.safetensors")
    behind = len({name.split(".")[2] for name in stored if ".layers." in name})
    more = {name: torch.ones(8, 8) for name in (f"model.layers.{behind}.mlp.up_proj.weight", "mtp.layers.0.weight")}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file({**stored, **more}, folder / "model.safetensors", {"format": "pt"})
    main(["verify", str(folder)])
    assert f"{folder}: 3 tensors that transformers does not load are left out" in capsys.readouterr().out
    report = check_folder(folder)
    assert not report.violations and {row.name for row in report.rows} <= stored.keys()
    assert report.size.weights == report.size.dense == sum(value.nbytes for value in stored.values())
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert "3 tensors that transformers does not load are left out, the first is" in capsys.readouterr().out
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == stored.keys()
    # The files that they are in are those of the source, whatever --model says.
    other = write_dense(tmp_path / "other", "llama")
    assert main(["export", str(folder), str(tmp_path / "again"), "--model", str(other), "--skip_proof"]) == 0
    assert f"{folder}: 3 tensors that transformers does not load" in capsys.readouterr().out


@pytest.mark.parametrize("build", [seeing_llava, seeing_qwen3_5])
def test_a_model_that_also_sees_is_proved_by_the_names_that_transformers_gives_its_tensors(
    tmp_path: Path, build: Callable[[], PreTrainedModel]
) -> None:
    """Llava is loaded under other names; of Qwen3.5 the text alone is loaded, and by the rows of its text model."""
    folder = tmp_path / "elsewhere"
    build().save_pretrained(folder)
    names = [row.name for row in check_folder(folder, NM(2, 4)).rows]
    stored = prune(folder, names)
    report = check_folder(folder)
    assert report.ok and report.size.weights == report.size.dense
    text_alone = build is seeing_qwen3_5
    assert text_alone == bool(report.unused) == all(".visual." in name for name in report.unused or ["none"])
    assert not text_alone or all("_proj" in name for name in names)  # no convolution of linear attention
    source = open_source(folder)
    assert source.specs.keys() == stored.keys() - report.unused
    loader = AutoModelForCausalLM if text_alone else AutoModelForImageTextToText
    state = filled_model(source).state_dict()
    for name, value in loader.from_pretrained(folder).state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("format", ["hf", "packed24"])
def test_names_without_that_of_the_inner_model(tmp_path: Path, format: str) -> None:
    """Read names as the original GPT-2 is stored: h.0... for transformer.h.0..., with a buffer of old versions."""
    folder = write_dense(tmp_path / "elsewhere", "gpt2")
    stored = load_file(folder / "model.safetensors")
    short = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    short["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(short, folder / "model.safetensors", {"format": "pt"})
    prune(folder, [row.name for row in check_folder(folder, NM(2, 4)).rows], -2)
    assert main(["export", str(folder), str(tmp_path / "out"), "--format", format]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_groups_of_an_unknown_family_run_along_the_last_axis(tmp_path: Path) -> None:
    """Groups run along the last axis, as nothing says otherwise."""
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of", "dtype": "float32"}')
    save_file({f"layers.{i}.w": torch.randn(16, 24) for i in range(2)}, tmp_path / "model.safetensors")
    tensors = prune(tmp_path, ["layers.0.w", "layers.1.w"])
    source = open_source(tmp_path)
    assert isinstance(source, FolderSource) and {weight.input_axis for weight in source.prunable.values()} == {-1}
    export(source, tmp_path / "packed", "packed24", skip_proof=True)
    assert torch.equal(open_source(tmp_path / "packed").read("layers.1.w"), tensors["layers.1.w"])
    assert torch.equal(source.read("layers.0.w"), tensors["layers.0.w"])


def test_a_folder_with_two_dtypes_keeps_both(tmp_path: Path) -> None:
    write_dense(tmp_path, "llama", "bfloat16")
    tensors = prune(tmp_path, [row.name for row in check_folder(tmp_path, NM(2, 4)).rows])
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    source = open_source(tmp_path)
    assert source.dtype == torch.bfloat16 and source.read("model.norm.weight").dtype == torch.float32
    assert open_source(tmp_path, dtype="float16").read("model.norm.weight").dtype == torch.float16


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_auto_is_what_config_json_says_and_not_the_files(tmp_path: Path, key: str) -> None:
    """transformers computes in that, so that another one in the export would be another model."""
    write_dense(tmp_path, "llama", "bfloat16")
    tensors = prune(tmp_path, [row.name for row in check_folder(tmp_path, NM(2, 4)).rows])
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    for message, dtype in (
        ({}, torch.bfloat16),
        ({key: "float32"}, torch.float32),
        ({key: "bfloat16"}, torch.bfloat16),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | message))
        source = open_source(tmp_path)
        assert source.dtype == dtype and source.record["dtype"] == str(dtype).removeprefix("torch.")
        assert {spec.dtype for spec in source.specs.values()} == {dtype}
        assert torch.equal(source.read(DOWN), tensors[DOWN].to(dtype))


def test_a_dtype_that_no_export_has_is_named_where_it_stands(tmp_path: Path) -> None:
    """`--dtype` is the cure, also for weights in float64."""
    write_dense(tmp_path, "llama")
    tensors = prune(tmp_path, [row.name for row in check_folder(tmp_path, NM(2, 4)).rows])
    config = json.loads((tmp_path / "config.json").read_text())
    config_json = tmp_path / "config.json"
    config_json.write_text(json.dumps(config | {"dtype": "float64"}))
    with pytest.raises(ValueError, match=f"^{config_json}: dtype 'float64' cannot be exported; .* --dtype float32$"):
        open_source(tmp_path)
    assert open_source(tmp_path, dtype="float32").dtype == torch.float32
    save_file({name: value.double() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    config_json.write_text(json.dumps({key: value for key, value in config.items() if key != "dtype"}))
    with pytest.raises(
        ValueError, match=f"^{tmp_path}: .*_proj.weight: its dtype 'float64' cannot be exported; .* float32$"
    ):
        open_source(tmp_path)
    source = open_source(tmp_path, dtype="float32")
    assert source.record["dtype"] == "float32" and torch.equal(source.read(DOWN), tensors[DOWN])
    config_json.write_text('{"model_type": "unheard_of", "dtype": "bfloat16"}')
    with pytest.raises(ValueError, match=f"^{config_json}: dtype 'bfloat16': {tmp_path}: its config.json cannot be"):
        open_source(tmp_path)


def test_a_source_that_does_not_exist_may_be_any_kind(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="none: no such folder; give a run's .*, one checkpoint in it, or a model's fold"
    ):
        open_source(tmp_path / "none")


def test_an_adapter_beside_an_export_without_one_is_refused(tmp_path: Path) -> None:
    sparse = write_sparse(tmp_path / "sparse", write_dense(tmp_path / "dense", "llama"), "llama")
    (sparse / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has a PEFT adapter beside its weights .* or take it out"):
        open_source(sparse)


def test_a_chosen_dtype_leaves_the_biases_of_a_router_alone(tmp_path: Path) -> None:
    """transformers keeps them in fp32, and so does the export of a run."""
    dense = write_dense(tmp_path / "dense", "glm4_moe")
    sparse = write_sparse(tmp_path / "sparse", dense, "glm4_moe")
    (tmp_path / "sparse" / "sparsity.json").rename(tmp_path / "sparsity.json")
    foreign = open_source(sparse, dtype="bfloat16")
    (tmp_path / "sparsity.json").rename(tmp_path / "sparse" / "sparsity.json")
    for source in (foreign, open_source(sparse, dtype="bfloat16")):
        biases = {name for name in source.specs if "e_score_correction_bias" in name}
        assert biases == {name for name, spec in source.specs.items() if spec.dtype == torch.float32} != set()


def test_a_card_does_not_say_that_we_pruned_it(tmp_path: Path) -> None:
    folder = write_dense(tmp_path / "elsewhere", "llama")
    prune(folder, [row.name for row in check_folder(folder, NM(2, 4)).rows])
    assert main(["export", str(folder), str(tmp_path / "out"), "--skip_proof"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "It was pruned elsewhere" in card
    assert not any(
        word in card for word in ("| method |", "| importance |", "- sparseforge\n", "sparseforge_ds made it")
    )


def test_another_pattern_from_elsewhere_is_exported_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_dense(tmp_path / "elsewhere", "llama")
    tensors = load_file(folder / "model.safetensors")
    names = [row.name for row in check_folder(folder, NM(2, 4)).rows]
    for name in names:
        kept = top_n(tensors[name].abs().view(-1, 8), 4).view_as(tensors[name])
        tensors[name] = tensors[name] * kept
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    command = ["export", str(folder), str(tmp_path / "out"), "--skip_proof"]
    assert main(command) == 2 and "takes --exclude for weights that are dense, and --pattern" in capsys.readouterr().err
    assert main([*command, "--pattern", "4:8"]) == 0 and f"{len(names)} weights in 4:8" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "again"), "--pattern", "4:8"]) == 2
    assert "has a sparsity.json, which says the pattern; leave it out" in capsys.readouterr().err


def test_what_is_not_2_4_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_dense(tmp_path / "else where", "llama")
    names = [row.name for row in check_folder(folder, NM(2, 4)).rows if row.name != DOWN]
    prune(folder, names)
    assert main(["export", str(folder), str(tmp_path / "out"), "--format", "packed24"]) == 2
    errors = capsys.readouterr().err
    assert (
        f"is not 2:4 as it is: 512 of 512 groups of {DOWN}; run `sparseforge verify '{folder}' --pattern 2:4`" in errors
    )
    # A weight that was left dense on purpose.
    dense = ["--exclude", "*layers.0.mlp.down_proj*"]
    assert main(["verify", str(folder), "--json", "no/x.json", *dense]) == 2
    assert "--json no/x.json: cannot be written" in capsys.readouterr().err
    assert main(["verify", str(folder)]) == 1 and "512 violations" in capsys.readouterr().out
    assert main(["verify", str(folder), "--json", str(tmp_path / "report"), *dense]) == 0
    printed = capsys.readouterr().out
    assert " 0 violations" in printed and f"not checked, as --exclude says: {dense[1]}\n" in printed
    assert json.loads((tmp_path / "report").read_text())["exclude"] == dense[1:]
    packing = ["--format", "packed24", "--skip_proof"]
    assert main(["export", str(folder), str(tmp_path / "packed"), *packing, *dense]) == 0
    assert DOWN not in open_source(tmp_path / "packed").prunable
    assert main(["verify", str(tmp_path / "packed")]) == 0
    capsys.readouterr()
    for words in (["verify"], ["export", "--format", "hf"]):
        paths = [str(tmp_path / "packed"), *([str(tmp_path / "out")] if words[0] == "export" else [])]
        assert main([words[0], *paths, *words[1:], *dense]) == 2
        assert "has a sparsity.json, which says what is dense; leave it out" in capsys.readouterr().err
    prune(folder, [DOWN])
    (folder / "adapter_config.json").write_text("{}")
    assert main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert "has a PEFT adapter beside its weights" in capsys.readouterr().err
    (folder / "adapter_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    assert main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert "has a quantization_config" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["hf", "packed24"])
def test_what_llm_compressor_only_pruned_is_a_source(tmp_path: Path, format: str) -> None:
    """Its config.json has a quantization_config, which says nothing about the weights, and the export's has none."""
    folder = write_dense(tmp_path / "elsewhere", "llama")
    tensors = prune(folder, [row.name for row in check_folder(folder, NM(2, 4)).rows])
    config = json.loads((folder / "config.json").read_text())
    stored = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    out = tmp_path / "out"
    assert main(["export", str(folder), str(out), "--format", format]) == 0
    written = json.loads((out / "config.json").read_text()).get("quantization_config", {})
    assert written.get("quant_method") == (None if format == "hf" else "sparseforge_packed24")
    assert torch.equal(open_source(out).read(DOWN), tensors[DOWN])


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "llama-tied"])
@pytest.mark.parametrize("values", [[], ["--values", "int8"]], ids=["exact", "rounded"])
def test_a_packed_folder_that_transformers_saved_is_a_source(tmp_path: Path, family: str, values: list[str]) -> None:
    """It has no sparsity.json."""
    sparse = write_sparse(tmp_path / "sparse", write_dense(tmp_path / "dense", family), family)
    packing = ["--format", "packed24", "--skip_proof", *values]
    assert main(["export", str(sparse), str(tmp_path / "packed"), *packing]) == 0
    register_format()
    AutoModelForCausalLM.from_pretrained(tmp_path / "packed").save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "sparsity.json").exists()
    # With its proof, to both formats; values are those of the folder that was loaded.
    expected = open_source(tmp_path / "packed")
    for format in ("hf", "packed24"):
        out = tmp_path / format
        assert main(["export", str(tmp_path / "saved"), str(out), "--format", format]) == 0
        assert main(["verify", str(out)]) == 0
        source = open_source(out)
        assert source.specs == expected.specs and source.prunable.keys() == expected.prunable.keys()
        for name in source.specs:
            assert torch.equal(bits(source.read(name)), bits(expected.read(name)))


def test_flags_are_checked_before_the_weights_of_a_folder_from_elsewhere_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_dense(tmp_path / "elsewhere", "llama")
    prune(folder, [row.name for row in check_folder(folder, NM(2, 4)).rows])
    other = write_dense(tmp_path / "other", "qwen3_moe")
    workers_of_passes = []

    def check(folder: Path, pattern: NM, workers: int | None, exclude: list[str]) -> object:
        workers_of_passes.append(workers)
        return check_folder(folder, pattern, workers, exclude)

    monkeypatch.setattr(folder_source, "check_folder", check)
    command = ["export", str(folder), str(tmp_path / "out"), "--skip_proof"]
    packing = ["--format", "packed24"]
    for flags, message in (
        (["--max_shard_size", "5 apples"], "--max_shard_size 5 apples: write a number of bytes"),
        (["--workers", "0"], "--workers 0: use 1 or more"),
        (["--values", "int8"], "--values int8: the hf format stores no rounded values; give --format packed24"),
        ([*packing, "--values", "int8", "--group_size", "16"], "--group_size 16: int8 has one scale a row"),
        ([*packing, "--values", "int4", "--group_size", "8"], "--group_size 8: packed24 stores scales of a"),
        ([*packing, "--values", "int8", "--text", "no.txt"], "--text no.txt: no such file"),
        ([*packing, "--pattern", "4:8"], "--pattern 4:8: the packed24 format holds 2:4; use --format hf"),
        (["--format", "compressed-tensors"], "has no quantized weights, and --format compressed-tensors stores no"),
        (["--model", str(other)], f"--model {other}: its config.json has "),
    ):
        assert main([*command, *flags]) == 2
        assert message in capsys.readouterr().err
    assert not workers_of_passes
    assert main([*command, "--workers", "1"]) == 0
    assert workers_of_passes == [1]
