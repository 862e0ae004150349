"""Every family's names in files are those that transformers writes, and a piece is the tensor under that name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.model.family_table import FAMILIES
from sparseforge_ds.model.saved_names import Placement, SavedTensor, saved_tensors
from tests.sparse_folders import ModelSource, write_dense, write_sparse
from tests.tiny_models import BUILDERS, MIXTURES, seeing_llava, tiny_llama


@pytest.mark.parametrize("family", BUILDERS)
def test_pieces_are_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = BUILDERS[family]()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: value for name, value in model.state_dict().items() if name not in tied}
    result = saved_tensors(family, {name: tuple(value.shape) for name, value in state.items()})
    assert result.keys() == saved.keys() and (result.keys() != state.keys()) == bool(FAMILIES[family].saved_as)
    for name, piece in result.items():
        value = state[piece.memory_name].view(-1)[piece.start : piece.stop].view(piece.shape)
        assert torch.equal(value, saved[name]), name
    assert saved_tensors(family, {name: tuple(value.shape) for name, value in saved.items()}) == {
        name: SavedTensor(name, 0, tuple(value.shape)) for name, value in saved.items()
    }


def test_one_of_tied_weights_is_enough() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tied = {"lm_head.weight", "model.embed_tokens.weight"}
    for absent in (set(), *({name} for name in tied), tied):
        stored = {name.removeprefix("model."): shape for name, shape in shapes.items() if name not in absent}
        placement = Placement(model, "llama", stored)
        assert placement.misfit is None and placement.places.keys() == stored.keys()
        assert set(placement.missing()) == (tied if absent == tied else set())


def test_what_transformers_renames_on_load_has_a_place(tmp_path: Path) -> None:
    model = seeing_llava()
    model.save_pretrained(tmp_path)
    stored = {name: spec.shape for name, spec in TensorFolder(tmp_path).specs.items()}
    assert "language_model.model.norm.weight" in stored
    placement = Placement(model, "llava", stored | {"language_model.model.other": (1,)})
    assert placement.places.keys() == stored.keys() and not placement.missing() and placement.misfit is None
    stored["language_model.model.norm.weight"] = (1,)
    assert "language_model.model.norm.weight has the shape (1,)" in str(Placement(model, "llava", stored).misfit)


def test_names_of_unknown_families_are_what_they_are() -> None:
    shapes = {"model.layers.0.mlp.experts.down_proj": (2, 4, 4)}
    for family in ("bloom", None, 3):
        assert saved_tensors(family, shapes) == {name: SavedTensor(name, 0, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("family", [family for family in MIXTURES if FAMILIES[family].saved_as])
def test_an_exported_mixture_has_the_names_of_the_dense_one(family: str, tmp_path: Path) -> None:
    """Export the names that were read; verify checks all experts, also where globs name fused ones."""
    dense = write_dense(tmp_path / "dense", family)
    sparse = write_sparse(tmp_path / "sparse", dense, family, max_shard_size="20KB")
    specs = TensorFolder(sparse).specs
    assert specs.keys() == TensorFolder(dense).specs.keys()
    assert all(specs[name] == spec for name, spec in TensorFolder(dense).specs.items())
    model, report = AutoModelForCausalLM.from_pretrained(sparse, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    source = ModelSource(BUILDERS[family](), dense, torch.float32)
    state = model.state_dict()
    for name, piece in saved_tensors(family, {name: tuple(value.shape) for name, value in state.items()}).items():
        value = state[piece.memory_name].view(-1)[piece.start : piece.stop].view(piece.shape)
        assert torch.equal(value, source.read(name)), name
    opened = open_source(sparse)
    assert (
        opened.specs == source.specs and opened.prunable == source.prunable and opened.fused_name == source.fused_name
    )

    sparsity = json.loads((sparse / "sparsity.json").read_text())
    fused = {
        name: entry["fused_name"].rpartition(".")[2]
        for name, entry in sparsity["weights"].items()
        if "fused_name" in entry
    }
    assert set(fused.values()) == {"gate_up_proj", "down_proj"} and all(".experts." in name for name in fused)
    checked = {row.name for row in check_folder(sparse).rows}
    assert check_folder(sparse).ok and checked == set(sparsity["weights"])
    # A run that kept the fused down_proj dense: its glob means every expert's.
    downs = [name for name in fused if fused[name] == "down_proj"]
    sparsity["dense"] |= {name: sparsity["weights"].pop(name) for name in downs}
    sparsity["config"]["exclude"] = ["*.experts.down_proj"]
    (sparse / "sparsity.json").write_text(json.dumps(sparsity))
    report = check_folder(sparse)
    assert report.ok and {row.name for row in report.rows} == checked - set(downs)
