"""`sparseforge bench` on stories260K, and its refusals."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPTJConfig, LlamaForCausalLM

from sparseforge_ds.cli import bench
from sparseforge_ds.cli.main import main
from sparseforge_ds.export.formats import export
from sparseforge_ds.extras.packed24 import compared_models, graph_speed, speed
from sparseforge_ds.extras.packed24.packed_linear import Packed24Linear
from sparseforge_ds.extras.packed24.speed import PAPER
from sparseforge_ds.packed_format.packed_values import Grid
from tests.sparse_folders import ModelSource, write_dense, write_sparse
from tests.tiny_folders import BYTE_VOCABULARY, file_size_limit, write_model
from tests.tiny_models import BUILDERS
from tests.unit.model.test_uncovered import tiny

SHORT = ["--prompt", "24", "--generated", "3", "--repeats", "3", "--threads", "1"]


def test_a_packed_model_takes_fewer_bytes_than_its_dense_one(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = assets / "models" / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    source = ModelSource(model, dense, torch.bfloat16)
    hf, packed = (str(tmp_path / form) for form in ("hf", "packed24"))
    for out in (hf, packed):
        export(source, Path(out), Path(out).name, skip_proof=True)
    assert main(["bench", packed, "--against", hf, "--batches", "1", "20", "--out", str(tmp_path / "out"), *SHORT]) == 0
    stdout = capsys.readouterr().out
    assert PAPER in stdout and "| MB resident |" in stdout
    measured = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [(row["work"], row["batch"]) for row in measured["speeds"]] == [
        (work, batch) for work in ("prefill", "decode") for batch in (1, 20)
    ]
    for row in measured["speeds"]:
        assert list(row["rates"]) == ["dense", "packed"] and list(row["over_dense"]) == ["packed"]
        for low, middle, high in (*row["rates"].values(), *row["over_dense"].values()):
            assert 0 < low <= middle <= high
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    # memory is that of the tensors: what is saved of the packed layers is 7/16 of their bf16 bytes
    layers = [
        layer for layer in AutoModelForCausalLM.from_pretrained(packed).modules() if type(layer) is Packed24Linear
    ]
    dense_bytes = sum(2 * layer.in_features * layer.out_features for layer in layers)
    packed_bytes = sum(layer.weight.nbytes + layer.weight_positions.nbytes for layer in layers)
    assert dense_bytes > 0 and packed_bytes <= 0.57 * dense_bytes
    of_packed = measured["models"]["packed"]
    of_dense = measured["models"]["dense"]
    assert of_dense["resident_bytes"] - of_packed["resident_bytes"] == dense_bytes - packed_bytes
    assert 0 < of_packed["disk_bytes"] < of_dense["disk_bytes"]


def test_rivals_quantize_the_layers_that_are_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quantize the layers that are packed, and leave the dense model as it is."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    dense = write_dense(tmp_path / "dense", "llama")
    packed = write_sparse(tmp_path / "packed", dense, "llama", format="packed24")
    arguments = ["bench", str(packed), "--rivals", "int8", "fp8", "int8", "--batches", "2", "--dtype", "bfloat16"]
    assert main([*arguments, "--out", str(tmp_path / "out"), *SHORT]) == 0
    assert "| dense int8 | dense int8 / dense |" in capsys.readouterr().out
    measured = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert list(measured["models"]) == ["dense", "packed", "dense int8", "dense fp8"]
    model = AutoModelForCausalLM.from_pretrained(packed)
    layers = [layer for layer in model.modules() if isinstance(layer, Packed24Linear)]
    # A byte a weight instead of two, and a scale a row.
    saved = sum(layer.in_features * layer.out_features for layer in layers)
    scales = sum(layer.out_features for layer in layers)
    resident = {name: of_model["resident_bytes"] for name, of_model in measured["models"].items()}
    for name in ("dense int8", "dense fp8"):
        assert 0 < resident[name] - (resident["dense"] - saved) <= 8 * scales
    assert all(set(row["over_dense"]) == set(measured["models"]) - {"dense"} for row in measured["speeds"])


def test_generation_with_a_static_cache_and_compiled_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generate with random weights; all but the compiler is as on CUDA."""
    BUILDERS["llama"](tie_word_embeddings=False).config.save_pretrained(tmp_path / "shapes")
    monkeypatch.setitem(graph_speed.SHAPES, "llama-2-7b", tmp_path / "shapes")
    written: dict[str, list[torch.Tensor]] = {"dense": [], "packed": []}
    made = graph_speed.GraphRun.compile_step

    def seen(run: Any) -> Any:
        name = "packed" if any(isinstance(m, Packed24Linear) for m in run.model.modules()) else "dense"
        step = made(run)
        return lambda ids: written[name].append(ids.clone()) or step(ids)

    monkeypatch.setattr(graph_speed.GraphRun, "compile_step", seen)
    pair = graph_speed.random_pair("llama-2-7b", 1, torch.float32)
    models = dict(zip(("packed", "dense"), pair, strict=True))
    workload = graph_speed.Lengths((2,), (graph_speed.Length(8, 5),), repeats=1)
    speeds, generations = graph_speed.measure_graphs({name: models[name] for name in ("dense", "packed")}, workload)
    works = [f"8x5 {work}" for work in ("prefill", "decode", "new tokens in all")]
    assert [(row.work, row.batch) for row in speeds] == [(work, 2) for work in works]
    assert "| byte bound |" in graph_speed.table_of_generations(generations)
    dense, packed = generations
    config = AutoConfig.from_pretrained(tmp_path / "shapes")
    for row in generations:
        assert 0 < row.first_token_seconds < row.seconds and row.peak_bytes is None
        assert row.cache_bytes == 2 * 2 * 13 * config.num_key_value_heads * config.head_dim * 4
        table = config.vocab_size * config.hidden_size * 4  # of which a step reads rows
        assert row.step_bytes == speed.resident(models[row.model]) - table + row.cache_bytes
        assert row.bytes_per_second == pytest.approx(row.step_bytes * row.decode_tokens_per_second / 2)
    assert packed.step_bytes is not None and dense.step_bytes is not None and packed.step_bytes < dense.step_bytes
    # Three turns of four steps, which begin from the same token every time.
    for steps in written.values():
        assert len(steps) == 12
        assert all(torch.equal(steps[step], steps[step % 4]) for step in range(12))
    beyond = graph_speed.Lengths((1,), (graph_speed.Length(64, 99999),), repeats=1)
    with pytest.raises(ValueError, match="--workload 64x99999: the model has"):
        graph_speed.measure_graphs(models, beyond)


def test_random_weights_need_no_model_and_a_report_no_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    BUILDERS["llama"]().config.save_pretrained(tmp_path / "shapes")
    monkeypatch.setitem(graph_speed.SHAPES, "llama-2-7b", tmp_path / "shapes")
    monkeypatch.setattr(bench, "find_spec", lambda name: None)  # as on a machine with nothing but what measures
    arguments = ["--shapes", "llama-2-7b", "--layers", "1", "--batches", "2", "--out", str(tmp_path / "out")]
    assert main(["bench", *arguments, *SHORT]) == 0
    output = capsys.readouterr()
    assert "bfloat16" in output.out and "no bench.png: it needs matplotlib" in output.err
    measured = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert measured["models"]["packed"]["model"] == "llama-2-7b, random, packed"
    assert not (tmp_path / "out" / "bench.png").exists()


def test_an_earlier_report_stays_whole_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    BUILDERS["llama"]().config.save_pretrained(tmp_path / "shapes")
    monkeypatch.setitem(graph_speed.SHAPES, "llama-2-7b", tmp_path / "shapes")
    out = tmp_path / "out"
    words = ["bench", "--shapes", "llama-2-7b", "--layers", "1", "--batches", "2", "--out", str(out), *SHORT]
    assert main(words) == 0
    report, picture = ((out / name).read_bytes() for name in ("bench.json", "bench.png"))
    assert len(picture) > 2 * len(report) > 200
    # There is room for none of the two, and then for the report alone.
    for room, name in ((100, "bench.json"), (2 * len(report), "bench.png")):
        with file_size_limit(room):
            assert main(words) == 2
        assert name in capsys.readouterr().err
        assert (out / "bench.png").read_bytes() == picture and json.loads((out / "bench.json").read_text())
        assert {path.name for path in out.iterdir()} == {"bench.json", "bench.png"}


def test_all_of_both_models_is_in_aligned_memory_before_it_is_measured(tmp_path: Path) -> None:
    """A mapped file has neither; positions are read as often as values."""
    dense = write_dense(tmp_path / "dense", "llama-odd")
    packed = write_sparse(tmp_path / "packed", dense, "llama-odd", format="packed24")
    for model in compared_models.load_pair(str(packed), str(dense), "auto"):
        tensors = [*model.named_parameters(), *model.named_buffers()]
        assert [name for name, tensor in tensors if tensor.data_ptr() % 64] == []


def test_a_mixture_holds_its_experts_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And speaks as its dense export does."""
    model = BUILDERS["qwen3_moe"](vocab_size=BYTE_VOCABULARY, bos_token_id=256, eos_token_id=257, pad_token_id=None)
    source = ModelSource(model, write_model(tmp_path / "dense", model), torch.float32)
    hf, packed = (str(tmp_path / form) for form in ("hf", "packed24"))
    for out in (hf, packed):
        export(source, Path(out), Path(out).name, skip_proof=True)
    assert main(["bench", packed, "--against", hf, "--batches", "1", "--out", str(tmp_path / "out"), *SHORT]) == 0
    measured = json.loads((tmp_path / "out" / "bench.json").read_text())
    sparse = sum(weight.numel() for name, weight in model.named_parameters() if name in source.fused_name.values())
    sparse += sum(math.prod(weight.shape) for name, weight in source.prunable.items() if "experts" not in name)
    models = measured["models"]
    saved = models["dense"]["resident_bytes"] - models["packed"]["resident_bytes"]
    assert saved == sparse * (4 - 2 - 1 / 8)  # of fp32: half the values, and a bit a weight
    capsys.readouterr()
    texts = []
    for folder in (hf, packed):
        assert main(["generate", folder, "Once", "--max_new_tokens", "6"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_values_that_are_rounded_for_the_measurement(family: str, tmp_path: Path) -> None:
    """They are those that an export rounds."""
    dense = write_dense(tmp_path / "dense", family)
    packed = write_sparse(tmp_path / "packed", dense, family, format="packed24")
    arguments = ["bench", str(packed), "--values", "int8", "int4:16", "--batches", "2", "--out", str(tmp_path / "out")]
    assert main([*arguments, *SHORT]) == 0
    measured = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert list(measured["models"]) == ["dense", "packed", "packed int8", "packed int4:16"]
    assert all(set(row["over_dense"]) == set(measured["models"]) - {"dense"} for row in measured["speeds"])
    model, _ = compared_models.load_pair(str(packed), None)
    for name, grid in (("int8", Grid("int8")), ("int4:16", Grid("int4", 16))):
        exported = write_sparse(tmp_path / name, dense, family, format="packed24", grid=grid)
        expected, _ = compared_models.load_pair(str(exported), None)
        rounded = compared_models.rounded(model, grid)
        state = rounded.state_dict()
        assert state.keys() == expected.state_dict().keys()
        assert all(torch.equal(state[key], value) for key, value in expected.state_dict().items())
        ids = torch.arange(3, 19)[None]
        with torch.no_grad():
            assert torch.equal(rounded(ids).logits, expected(ids).logits)
        assert measured["models"][f"packed {name}"]["resident_bytes"] == speed.resident(expected)
        with pytest.raises(ValueError, match="its values are rounded; leave --values out"):
            compared_models.rounded(rounded, grid)
    with pytest.raises(ValueError, match="groups of 48 values do not divide the 16 kept inputs of a row"):
        compared_models.rounded(model, Grid("int4", 48))


def test_a_rival_without_torchao_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = write_dense(tmp_path / "dense", "llama")
    packed = write_sparse(tmp_path / "packed", dense, "llama", format="packed24")
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert main(["bench", str(packed), "--rivals", "int8", *SHORT]) == 2
    assert "--rivals int8: torchao is not installed; pip install torchao" in capsys.readouterr().err


def test_flags_that_do_not_fit_a_model_are_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loaded models are compared, so that the sizes of these two would be refused first."""
    dense = write_dense(tmp_path / "dense", "llama")
    packed = write_sparse(tmp_path / "packed", dense, "llama", format="packed24")
    rounded = write_sparse(tmp_path / "rounded", dense, "llama", format="packed24", grid=Grid("int8"))
    other = write_dense(tmp_path / "other", "llama-odd")
    monkeypatch.setattr(bench, "find_spec", lambda name: None)  # as without torchao
    for model, flags, message in (
        (packed, ["--rivals", "fp8"], "--rivals fp8: torchao is not installed"),
        (rounded, ["--values", "fp8_e4m3"], f"--values: the values of {rounded} are rounded already; leave it out"),
        (packed, ["--values", "int8", "int4:48"], "groups of 48 values do not divide the 32 kept inputs of a row"),
        (packed, ["--prompt", "99999"], "--prompt 99999: the model has"),
        (packed, ["--generated", "99999"], "--generated 99999: the model has"),
        (packed, [], "hidden_size 20 is not the"),
    ):
        assert main(["bench", str(model), "--against", str(other), *SHORT, *flags]) == 2
        assert message in capsys.readouterr().err


def test_a_packed_model_in_the_place_of_the_dense_one_is_said_to_be_unpacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files are not those of the model that is measured."""
    dense = write_dense(tmp_path / "dense", "llama")
    first = write_sparse(tmp_path / "first", dense, "llama", format="packed24")
    second = write_sparse(tmp_path / "second", dense, "llama", format="packed24")
    out = tmp_path / "out"
    assert main(["bench", str(first), "--against", str(second), "--batches", "1", "--out", str(out), *SHORT]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| MB disk"))
    assert row.split("|")[3].strip() == "-"
    of_dense = json.loads((out / "bench.json").read_text())["models"]["dense"]
    assert of_dense["model"] == f"{second}, unpacked" and of_dense["disk_bytes"] is None


def test_what_a_config_shows_is_said_before_a_model_is_loaded_or_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compared_models, "load_model", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr(graph_speed, "random_pair", lambda *_: pytest.fail("models were made"))
    dense = write_dense(tmp_path / "dense", "llama")
    packed = write_sparse(tmp_path / "packed", dense, "llama", format="packed24")
    other = write_dense(tmp_path / "other", "llama-odd")
    half = write_dense(tmp_path / "half", "llama", "bfloat16")
    quantized = shutil.copytree(dense, tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (quantized / "config.json").write_text(json.dumps(config))
    for arguments, message in (
        ([str(dense)], f"{dense}: none of its weights is packed, so there is nothing to compare; pack them"),
        ([str(packed), "--against", str(other)], f"{other}: hidden_size 20 is not the "),
        ([str(packed), "--against", str(half)], "so the times would compare dtypes; give --dtype float32"),
        ([str(packed), "--against", str(quantized)], f"--against {quantized}: its weights are quantized (gptq); give"),
        (
            ["--shapes", "llama-2-7b", "--layers", "1", "--values", "int4:48"],
            "--values int4:48: model.layers.0.self_attn.q_proj: groups of 48 values do not divide the 2048 kept inputs",
        ),
        (["--shapes", "llama-2-7b", "--layers", "33"], "--layers 33 is not valid: the model has 32"),
    ):
        assert main(["bench", *arguments, *SHORT]) == 2
        assert message in capsys.readouterr().err


def test_a_model_that_graphs_cannot_hold_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = write_dense(tmp_path / "dense", "llama")
    packed = write_sparse(tmp_path / "packed", dense, "llama", format="packed24")
    graph_speed.require_compilable(str(packed))
    monkeypatch.setattr(compared_models, "load_model", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr(LlamaForCausalLM, "_can_compile_fullgraph", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # or the engine itself would be refused
    assert main(["bench", str(packed), "--against", str(dense), "--workload", "8x8"]) == 2
    message = (
        f"--engine graph: transformers cannot compile {packed}, a LlamaForCausalLM, as a whole; use --engine eager"
    )
    assert message in capsys.readouterr().err


def test_what_cannot_be_measured_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = write_dense(tmp_path / "dense", "llama")
    packed = write_sparse(tmp_path / "packed", dense, "llama", format="packed24")
    other = write_dense(tmp_path / "other", "llama-odd")
    half = write_dense(tmp_path / "half", "llama", "bfloat16")
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "dtype"}))
    positioned = tmp_path / "gptj"
    tiny(GPTJConfig, n_layer=1, n_head=4, rotary_dim=4)().save_pretrained(positioned)
    # Models, and settings that do not fit them or each other.
    for arguments, message in (
        ([str(positioned), *SHORT], "none of its weights is packed, so there is nothing to compare; pack them"),
        ([str(dense), *SHORT], "none of its weights is packed, so there is nothing to compare; pack them"),
        ([str(packed), "--against", str(other), *SHORT], "hidden_size 20 is not the"),
        ([str(packed), "--against", str(half), *SHORT], "so the times would compare dtypes; give --dtype float32"),
        (["no/model", "--out", str(dense / "config.json")], "config.json is a file; give another place"),
        (["no/model", "--out", str(dense / "config.json" / "x")], "config.json is a file; give another place"),
        (
            [str(packed), "--values", "int5"],
            "--values: 'int5' is no form of values; use int8, fp8_e4m3, int4, or int4:N",
        ),
        ([str(packed), "--values", "int8:64"], "--values: 'int8:64' is no form of values"),
        ([str(packed), "--values", "int4:0"], "--values: 'int4:0' is no form of values"),
        ([str(packed), "--repeats", "0"], "--repeats 0: give 1 or more"),
        ([], "give MODEL, or --shapes for random weights, and not both"),
        ([str(packed), "--shapes", "qwen3-14b"], "give MODEL, or --shapes for random weights, and not both"),
        (["--shapes", "qwen3-14b", "--against", str(dense)], "--shapes makes both models; leave one out"),
        (["--shapes", "qwen3-14b", "--layers", "41"], "--layers 41 is not valid: the model has 40; use 1 to that many"),
        (["--shapes", "qwen3-14b", "--prompt", "99999"], "--prompt 99999: the model has 40960 positions"),
        ([str(packed), "--layers", "2"], "--layers 2: MODEL has its layers; leave it out, or give --shapes"),
        ([str(packed), "--engine", "eager", "--workload", "8x8"], "--workload: --engine eager does not read it; give"),
        ([str(packed), "--engine", "graph", "--prompt", "8"], "--prompt: --engine graph does not read it; give"),
        (["--shapes", "qwen3-14b", "--engine", "graph"], "--engine graph: needs a GPU with CUDA, and torch has none"),
    ):
        assert main(["bench", *arguments]) == 2
        assert message in capsys.readouterr().err
    # Words that the parser itself refuses.
    with pytest.raises(SystemExit, match="2"):
        main(["bench", str(packed), "--workload", "8x1"])
    assert "'8x1' is no workload; give tokens of a prompt and 2 new ones or more" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["bench", str(packed), "--dtype", "int8"])
    assert "argument --dtype: invalid choice: 'int8' (choose from" in capsys.readouterr().err
