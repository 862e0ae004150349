from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForSequenceClassification

from sparseforge_ds.export import formats, proof
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.proof import prove_folder, require_provable
from sparseforge_ds.export.reference import filled_model
from sparseforge_ds.export.source import Source
from tests.conftest import ROOT
from tests.forked_interpreter import run_script
from tests.sparse_folders import ModelSource, write_dense, write_sparse
from tests.tiny_models import tiny_llama

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("proof")
    return write_sparse(folder / "sparse", write_dense(folder / "dense", "llama", "bfloat16"), "llama", "bfloat16")


@pytest.fixture
def source(sparse: Path) -> Source:
    return open_source(sparse)


@pytest.mark.parametrize("format", ["hf", "packed24"])
def test_a_good_export_is_proved_and_says_how(sparse: Path, source: Source, tmp_path: Path, format: str) -> None:
    record = export(source, tmp_path / "out", format)
    written = json.loads((tmp_path / "out" / "sparsity.json").read_text())
    assert written["proof"] == record["proof"]
    assert written["proof"]["logits"] == "bit-equal" and written["proof"]["class"] == "LlamaForCausalLM"
    assert written["proof"]["loaded_by"] == ("transformers" if format == "hf" else "transformers with sparseforge_ds")
    assert written["proof"]["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize("format", ["hf", "packed24"])
def test_the_class_that_config_json_names_is_proved(tmp_path: Path, format: str) -> None:
    if format == "packed24":
        pytest.importorskip("sparseforge_ds.extras.packed24", reason="transformers loads packed folders by it")
    config = copy.copy(tiny_llama().config)
    config.num_labels = 3
    model = LlamaForSequenceClassification(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    record = export(ModelSource(model, tmp_path / "dense", torch.bfloat16), tmp_path / "out", format)
    assert record["proof"]["class"] == "LlamaForSequenceClassification"
    loaded = LlamaForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.score.weight, model.score.weight)


def _edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return spoil


def _one_bit(tensors: dict[str, torch.Tensor]) -> None:
    tensors[QUERY].view(torch.int16)[0, 0] ^= 1 << 6


def _config(key: str, value: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: value}))

    return spoil


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "one bit": (_edit(_one_bit), "its logits differ from the source's"),
    "a weight is missing": (_edit(lambda tensors: tensors.pop(QUERY)), f"reports missing_keys {QUERY}"),
    "a weight too many": (_edit(lambda tensors: tensors.update(odd=torch.ones(1))), "reports unexpected_keys odd"),
    "another shape": (_edit(lambda tensors: tensors.update({QUERY: torch.ones(2, 2)})), "ignore_mismatched_sizes"),
    "another activation": (_config("hidden_act", "gelu"), "its logits differ from the source's"),
    "another dtype": (_config("dtype", "float32"), "its logits differ from the source's"),
    "another class": (_config("model_type", "nonsense"), "the proof failed"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no file named model.safetensors"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_folder_is_found_out(sparse: Path, source: Source, tmp_path: Path, damage: str) -> None:
    shutil.copytree(sparse, tmp_path / "bad")
    spoil, message = DAMAGES[damage]
    spoil(tmp_path / "bad")
    with pytest.raises(ValueError, match="the proof failed") as raised:
        prove_folder(source, tmp_path / "bad", plain=True)
    assert message in str(raised.value)


def test_nothing_is_left_of_an_export_that_fails_its_proof(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseforge_ds.export import model_folder

    pack = model_folder.pack24

    def wrong(weight: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, positions = pack(weight, axis)
        return values + 1, positions

    monkeypatch.setattr(model_folder, "pack24", wrong)
    with pytest.raises(ValueError, match="the written folder does not verify"):
        export(source, tmp_path / "out", "packed24")

    def spoil(source: Source, folder: Path, plain: bool, grid: str | None) -> None:
        raise ValueError(f"{folder}: the proof failed: as it should")  # a folder that has a temporary name

    monkeypatch.undo()
    for format in ("hf", "packed24"):
        monkeypatch.setattr(formats, "prove_folder", spoil)
        with pytest.raises(ValueError, match=f"^{tmp_path / 'out'}: the proof failed: as it should"):
            export(source, tmp_path / "out", format)
    assert not list(tmp_path.iterdir())


def test_a_head_that_differs_from_the_weight_that_it_is_tied_to(tmp_path: Path) -> None:
    """transformers would compute with one of them."""
    head = "lm_head.weight"
    embedding = "model.embed_tokens.weight"
    folder = write_dense(tmp_path / "dense", "llama-tied")
    model = ModelSource(tiny_llama(tie_word_embeddings=True), folder, torch.float32)
    stored = {embedding: model.read(embedding), head: model.read(embedding)}

    class WithHead(ModelSource):
        def read(self, name: str) -> torch.Tensor:
            return stored[name].clone() if name in stored else super().read(name)

    source = WithHead(tiny_llama(tie_word_embeddings=True), folder, torch.float32)
    source.specs = {**source.specs, head: source.specs[embedding]}
    filled_model(source)
    stored[head] = stored[head] + 1
    with pytest.raises(ValueError, match=f"ties {head} to {embedding}, .* set tie_word_embeddings to false there, or"):
        filled_model(source)


def test_a_packed_folder_is_not_loaded_without_us(source: Source, tmp_path: Path) -> None:
    export(source, tmp_path / "packed", "packed24", skip_proof=True)
    with pytest.raises(ValueError, match="the proof failed"):
        prove_folder(source, tmp_path / "packed", plain=True)


def test_too_little_memory_is_said_before_any_work(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "free_memory", lambda: 10**8)
    for format in ("hf", "packed24"):
        with pytest.raises(ValueError, match=r"needs about 0\.6 GB of memory, 0\.1 GB are available.*--skip_proof"):
            export(source, tmp_path / "out", format)
    export(source, tmp_path / "out", "packed24", skip_proof=True)
    monkeypatch.setattr(proof, "free_memory", lambda: 10**12)
    require_provable(source, packed=False)


def test_no_process_needs_deepspeed() -> None:
    code = """
import sys
import sparseforge_ds.export.reference, sparseforge_ds.export.formats
from transformers import AutoModelForCausalLM
assert "deepspeed" not in sys.modules
"""
    done = run_script(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
