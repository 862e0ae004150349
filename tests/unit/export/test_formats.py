"""The frame of all formats, and that the default one carries nothing that other tools take for something else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from sparseforge_ds.checkpoint.tensors import TensorFolder, hash_tensor
from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate import perplexity
from sparseforge_ds.export import formats, model_folder
from sparseforge_ds.export.formats import Format, export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.proof import prove_folder
from sparseforge_ds.packed_format.packed_values import GRIDS, Grid
from sparseforge_ds.packed_format.packing import unpack24
from tests.conftest import ROOT
from tests.forked_interpreter import run_script
from tests.sparse_folders import MODELS, ModelSource, write_dense, write_sparse
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer

# Read by some version of vLLM, transformers, compressed-tensors, llm-compressor, AutoGPTQ, AutoAWQ or ModelOpt.
THEIR_KEYS = {
    "quantization_config",
    "compression_config",
    "sparsity_config",
    "quantization",
    "quant_method",
    "quantization_status",
    "auto_map",
    "transformers_weights",
}
THEIR_FILES = {
    "recipe.yaml",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "compression_config.json",
    "hf_quant_config.json",
    "adapter_config.json",  # in the folder itself it makes transformers load an adapter
    "consolidated.safetensors",  # makes vLLM take the folder for one of Mistral's
    "params.json",
}
OURS = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "sparsity.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def all_keys(content: Any) -> set[str]:
    if isinstance(content, dict):
        return set(content) | {key for value in content.values() for key in all_keys(value)}
    return {key for value in content for key in all_keys(value)} if isinstance(content, list) else set()


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """Write a sparse folder with a tokenizer and an embedding of more rows than it has tokens."""
    model = MODELS["llama"](vocab_size=BYTE_VOCABULARY).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    byte_tokenizer().save_pretrained(tmp_path / "dense")
    assert len(byte_tokenizer()) < BYTE_VOCABULARY
    (tmp_path / "dense" / "additional_chat_templates").mkdir()
    (tmp_path / "dense" / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    return tmp_path / "dense"


@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
def test_the_default_export_is_nothing_but_an_ordinary_folder(
    tmp_path: Path, padded: Path, max_shard_size: str
) -> None:
    model = MODELS["llama"](vocab_size=BYTE_VOCABULARY)
    source = ModelSource(model, padded, torch.bfloat16)
    out = tmp_path / "out"
    export(source, out, max_shard_size=max_shard_size, skip_proof=True)

    # Files and keys are those that transformers writes, and no others.
    files = {file.name for file in out.iterdir()}
    shards = {name for name in files if name.startswith("model-")}
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    files.remove("additional_chat_templates")
    assert not files & THEIR_FILES and files - shards <= OURS and bool(shards) == (max_shard_size == "10KB")
    assert not all_keys(json.loads((out / "config.json").read_text())) & THEIR_KEYS
    # Every weight is there, once, in the dtype of the export.
    expected = model.state_dict()
    results: dict[str, tuple[int, ...]] = {}
    for file in sorted(shards or {"model.safetensors"}):
        with safe_open(out / file, framework="pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}
            results |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
            assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118
    assert results == {name: tuple(value.shape) for name, value in expected.items()}
    # An index exists where there are several files.
    if shards:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index.keys() == {"metadata", "weight_map"} and index["metadata"].keys() == {"total_size"}
        assert index["weight_map"].keys() == expected.keys() and set(index["weight_map"].values()) == shards
    # Plain transformers loads it without a missing or unexpected weight.
    loaded, report = AutoModelForCausalLM.from_pretrained(out, use_safetensors=True, output_loading_info=True)
    assert not any(report.values()) and type(loaded) is type(model)


def test_nobody_reads_sparsity_json(tmp_path: Path, padded: Path) -> None:
    """Not even opened by whoever loads config, weights, tokenizer and generation settings."""
    model = MODELS["llama"](vocab_size=BYTE_VOCABULARY)
    export(ModelSource(model, padded, torch.bfloat16), tmp_path / "out", skip_proof=True)
    code = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
folder = sys.argv[1]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
pipeline("text-generation", model=model, tokenizer=tokenizer)("abc", max_new_tokens=2)
ours = {path.rpartition("/")[2] for path in opened if path.startswith(folder)}
assert "config.json" in ours and "sparsity.json" not in ours, ours
assert "sparseforge_ds" not in sys.modules
"""
    done = run_script(code, str(tmp_path / "out"), cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_format_that_a_source_has_not_is_refused(tmp_path: Path) -> None:
    sparse = write_sparse(tmp_path / "sparse", write_dense(tmp_path / "dense", "llama"), "llama")
    out = str(tmp_path / "out")
    with pytest.raises(ValueError, match="--format 'onnx': use one of hf, packed24"):
        export(open_source(sparse), out, "onnx")  # type: ignore[arg-type]
    assert main(["export", str(tmp_path / "dense"), out]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["packed24", "hf"])
def test_out_is_whole_or_not_there(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = write_sparse(tmp_path / "sparse", write_dense(tmp_path / "dense", "llama"), "llama")
    arguments = ["export", str(sparse), str(tmp_path / "out"), "--format", format, "--skip_proof"]
    (tmp_path / "out").mkdir()
    assert main(arguments) == 0  # an empty folder is as good as none
    assert main(arguments) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err

    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    arguments[2] = str(tmp_path / "link")
    assert main(arguments) == 2
    assert "link: is a symbolic link; give the name of a new folder" in capsys.readouterr().err
    (tmp_path / "link").unlink()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(formats, "write_model", full)
    arguments[2] = str(tmp_path / "two")
    assert main(arguments) == 2
    assert "No space left on device); nothing was left behind" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out", "sparse"]


@pytest.mark.parametrize("format", ["hf", "packed24"])
def test_a_skipped_proof_is_reported(tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    sparse = write_sparse(tmp_path / "sparse", write_dense(tmp_path / "dense", "llama"), "llama")
    out = tmp_path / "out"
    assert main(["export", str(sparse), str(out), "--format", format, "--skip_proof"]) == 0
    assert "not proved: --skip_proof" in capsys.readouterr().out
    record = json.loads((out / "sparsity.json").read_text())
    assert record["proof"] is None


def test_formats_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"\n  {format}\s", text) for format in get_args(Format))


def test_a_folder_changed_since_its_export_is_no_source(tmp_path: Path) -> None:
    sparse = write_sparse(tmp_path / "sparse", write_dense(tmp_path / "dense", "llama"), "llama")
    tensors = load_file(sparse / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"].mul_(2)
    save_file(tensors, sparse / "model.safetensors", {"format": "pt"})
    for format in ("packed24", "hf"):
        with pytest.raises(ValueError, match="sha256"):
            export(open_source(sparse), tmp_path / "out", format, skip_proof=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "sparse"]


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a sparse bf16 folder with a tokenizer, and the texts to measure on."""
    folder = tmp_path_factory.mktemp("rounded")
    model = MODELS["llama"](vocab_size=BYTE_VOCABULARY).to(torch.bfloat16)
    model.save_pretrained(folder / "dense")
    byte_tokenizer().save_pretrained(folder / "dense")
    export(ModelSource(model, folder / "dense", torch.bfloat16), folder / "sparse", skip_proof=True)
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 9)
    return folder / "sparse", folder / "text.txt"


def test_a_proved_folder_stays_where_it_cannot_be_measured(
    rounded: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse, text = rounded

    def fail(*_args: Any, **_kwargs: Any) -> None:
        torch.empty(10**15)

    monkeypatch.setattr(perplexity, "measure", fail)
    out = tmp_path / "the out"
    command = ["export", str(sparse), str(out), "--format", "packed24", "--values", "int8", "--text", str(text)]
    assert main(command) == 2
    message = f"{out} is written and proved, and stays; but what rounding costs could not be measured: "
    said = capsys.readouterr().err
    assert message in said and "allocate memory" in said and said.count("error: ") == 1
    assert f"measure it by sparseforge evaluate '{out}' --dense DENSE" in said
    assert main(["verify", str(out)]) == 0
    assert "compared" not in json.loads((out / "sparsity.json").read_text())


def test_a_classifier_is_not_scored_on_text_and_its_card_keeps_its_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = MODELS["llama"](vocab_size=BYTE_VOCABULARY).config
    config.num_labels = 3
    config.pad_token_id = 0
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "dense")
    byte_tokenizer().save_pretrained(tmp_path / "dense")
    export(ModelSource(model, tmp_path / "dense", torch.float32), tmp_path / "sparse")
    card = (tmp_path / "sparse" / "README.md").read_text()
    assert "LlamaForSequenceClassification.from_pretrained(" in card and "text-generation" not in card
    (tmp_path / "text.txt").write_text("It was the best of times. " * 9)
    command = ["export", str(tmp_path / "sparse"), str(tmp_path / "out"), "--format", "packed24", "--values", "int8"]
    assert main([*command, "--text", str(tmp_path / "text.txt")]) == 2
    assert "scored by causal language models, not by LlamaForSequenceClassification" in capsys.readouterr().err


@pytest.mark.parametrize(("values", "size"), [*((values, None) for values in GRIDS), ("int4", 16)])
def test_values_are_rounded_proved_measured_and_verified(
    rounded: tuple[Path, Path], values: str, size: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse, text = rounded
    out = tmp_path / "out"
    flags = ["--format", "packed24", "--values", values, *([] if size is None else ["--group_size", str(size)])]
    assert main(["export", str(sparse), str(out), *flags, *(["--text", str(text)] if values == "int8" else [])]) == 0
    stdout = capsys.readouterr().out
    assert "proved: loaded by transformers with sparseforge_ds, logits bit-equal" in stdout
    record = json.loads((out / "sparsity.json").read_text())
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "sparseforge_packed24", "format": 1, "values": values} | (
        {} if size is None else {"group_size": size}
    )
    if values == "int8":
        assert 0 < record["compared"]["kl"] < 0.01 and record["compared"]["text"] == text.name
        assert f"KL to the model without rounding {record['compared']['kl']:.5f} nats a token on " in stdout
    else:
        assert "what rounding costs was not measured; give --text TEXT" in stdout

    # The card says the same.
    card = (out / "README.md").read_text()
    summary = next(line.partition("values: ")[2] for line in stdout.splitlines() if ": values: " in line)
    assert "rounding changed a weight by" in summary and f"| rounded after training, to nearest | {summary} |" in card
    assert ("KL to the model without rounding" in card) == (values == "int8")

    # Five or three bits a weight, and scales; what is unpacked is what was hashed.
    stored = TensorFolder(out)
    exact = open_source(sparse)
    for name, row in record["weights"].items():
        codes, positions, scale = (stored.read(name + part) for part in ("", "_positions", "_scale"))
        inputs = exact.read(name).shape[1]
        assert codes.nbytes + positions.nbytes == (3 if values == "int4" else 5) / 8 * exact.read(name).numel()
        assert codes.dtype == GRIDS[values] and scale.shape == (len(codes), inputs // 2 // size if size else 1)
        dense = unpack24(codes, positions, scale, torch.bfloat16)
        assert (
            hash_tensor(dense) == row["sha256"]
            and 0 < row["error"] < {"int8": 0.01, "fp8_e4m3": 0.04, "int4": 0.15}[values]
        )
        error = (dense - exact.read(name)).double().norm() / exact.read(name).double().norm()
        assert row["error"] == pytest.approx(error.item())
    assert main(["verify", str(out), "--json", str(tmp_path / "report.json")]) == 0
    per = "a row" if size is None else f"for {size} kept values"
    described = f"values: {values}, one scale {per}; rounding changed a weight by "
    assert described in stdout and described in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["values"], report["group_size"]) == (values, size)

    # It is a source of what it computes, and is not rounded twice.
    export(open_source(out), tmp_path / "hf", skip_proof=True)
    dense = TensorFolder(tmp_path / "hf")
    assert all(hash_tensor(dense.read(name)) == row["sha256"] for name, row in record["weights"].items())
    assert main(["export", str(out), str(tmp_path / "again"), *flags]) == 2
    assert f"are {values} already, and would be rounded twice; export from what" in capsys.readouterr().err
    assert main(["export", str(out), str(tmp_path / "unpacked"), "--format", "packed24", "--skip_proof"]) == 0
    assert f"note: the values of {out} are {values}, and are stored unpacked, in " in capsys.readouterr().out

    # Scales that were changed so little that no weight changes are seen, too.
    tensors = load_file(out / "model.safetensors")
    first = next(iter(record["weights"]))
    scale = tensors[first + "_scale"]
    scale[0] = scale[0].nextafter(torch.tensor(1.0, dtype=scale.dtype))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert main(["verify", str(out)]) == 1
    assert f"not the exported bytes: {first}" in capsys.readouterr().out
    scale[0] = 0
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert main(["verify", str(out)]) == 2
    assert (
        f"{first}: scales are positive and finite, and {scale.shape[1]} are not, first 0.0" in capsys.readouterr().err
    )

    # Before anything is read, the headers tell another size.
    stored_config = json.loads((out / "config.json").read_text())
    stored_config["quantization_config"]["group_size"] = 32
    (out / "config.json").write_text(json.dumps(stored_config))
    assert main(["verify", str(out)]) == 2
    stderr = capsys.readouterr().err
    assert any(
        words in stderr for words in ("group_size 32 is damaged", "groups of 32 values", "one for 32 is (32, 1)")
    )


def test_the_score_of_a_run_is_not_that_of_values_that_are_rounded_afterwards(
    rounded: tuple[Path, Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(rounded[0], source)
    record = json.loads((source / "sparsity.json").read_text())
    run = {"dataset": ["a.jsonl"], "evaluation": {"loss": 2.0, "text": "held_out.jsonl"}}
    (source / "sparsity.json").write_text(json.dumps({**record, "run": run}))
    for grid, expected in ((None, run), (Grid("int8"), {"dataset": ["a.jsonl"]})):
        out = tmp_path / str(grid)
        export(open_source(source), out, "packed24", skip_proof=True, grid=grid)
        assert json.loads((out / "sparsity.json").read_text())["run"] == expected


def test_flags_that_do_not_fit_rounded_values_are_refused(
    rounded: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = str(rounded[0])
    out = str(tmp_path / "out")
    short = tmp_path / "short.txt"
    short.write_text("Less than a window.")
    # By the command line, with the cure.
    for flags, message in (
        (["--values", "int8"], "--values int8: the hf format stores no rounded values; give --format packed24"),
        (["--group_size", "16"], "--group_size 16: it is for rounded values; give --values int4"),
        (
            ["--format", "packed24", "--values", "int8", "--group_size", "16"],
            "--group_size 16: int8 has one scale a row",
        ),
        (
            ["--format", "packed24", "--values", "int4", "--group_size", "8"],
            "--group_size 8: packed24 stores scales of a",
        ),
        (
            ["--format", "packed24", "--values", "int4", "--group_size", "48"],
            "--group_size 48: does not divide the 16 kept",
        ),
        (["--format", "packed24", "--text", "a.txt"], "--text a.txt: it is what rounding is measured on; give"),
        (["--format", "packed24", "--values", "int8", "--text", "a.txt"], "--text a.txt: no such file; give a file of"),
        (
            ["--format", "packed24", "--values", "int8", "--text", str(short)],
            f"--text {short}: the text has 19 tokens, less than one window of 64; give a longer text",
        ),
    ):
        assert main(["export", sparse, out, *flags]) == 2
        assert message in capsys.readouterr().err
    # In Python, and nothing is written.
    with pytest.raises(ValueError, match="--values int3: use one of int8, fp8_e4m3, int4"):
        export(open_source(sparse), out, "packed24", grid=Grid("int3"))
    assert not (tmp_path / "out").exists()


def test_the_proof_sees_a_rounded_weight_that_was_packed_wrong(
    rounded: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = model_folder.round_values

    def twice(values: Any, input_axis: int, grid: Grid) -> Any:
        codes, scale = honest(values, input_axis, grid)
        return codes, scale * 2

    source = open_source(rounded[0])
    with monkeypatch.context() as patched:
        patched.setattr(model_folder, "round_values", twice)
        (tmp_path / "wrong").mkdir()
        model_folder.write_model(source, tmp_path / "wrong", "packed24", grid=Grid("int8"))
    with pytest.raises(ValueError, match="the proof failed: its logits differ from the source's"):
        prove_folder(source, tmp_path / "wrong", plain=False, grid=Grid("int8"))
