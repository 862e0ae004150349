"""Folders of models from elsewhere: no command follows a link out of one, and caches of the hub work as before."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparseforge_ds.checkpoint.disk import open_own_file
from sparseforge_ds.checkpoint.model_files import check_model_folder, is_legal_file
from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.cli.main import main
from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.export import upload
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.model_folder import copy_other_files
from sparseforge_ds.model.pretrained import find_model
from sparseforge_ds.train.run_folder import check_run_folder, lock_folder, write_folder
from sparseforge_ds.train.spec import make_spec
from tests.sparse_folders import ModelSource
from tests.tiny_folders import deepspeed_json, write_json, write_model, write_text

LINKS = ["notes.txt", "LICENSE.extra", "added.json", "additional_chat_templates", "additional_chat_templates/a.jinja"]
LEGAL = {
    True: (
        *("LICENSE", "license.md", "LICENSE-MODEL", "LICENCE", "NOTICE.txt", "THIRD_PARTY_NOTICES", "USE_POLICY.md"),
        *("Acceptable-Use-Policy.pdf", "TERMS_OF_USE", "COPYING"),
    ),
    False: (
        *("README.md", "modeling_policy.py", "terminal.txt", "policy.safetensors", "merges.txt"),
        *("notice.onnx", "terms.h5", "license.npz", "policy.msgpack", "terms.tflite", "notice.pkl"),
    ),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def sparse(dense: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(dense)
    export(ModelSource(model, dense, torch.float32), dense.parent / "sparse", skip_proof=True)
    return dense.parent / "sparse"


@pytest.fixture
def cloned(sparse: Path, tmp_path: Path) -> Path:
    """Clone a model, beside a secret of this machine."""
    (tmp_path / "secret").write_text("TOP-SECRET")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id_rsa").write_text("KEY")
    return Path(shutil.copytree(sparse, tmp_path / "cloned"))


def _readers(folder: Path, out: Path) -> dict[str, Callable[[], Any]]:
    """Return every way to read a model's folder, as a call that raises, or returns the exit code of a command."""
    text = ["--text", str(folder / "config.json")]
    return {
        "export": lambda: main(["export", str(folder), str(out / "export"), "--skip_proof"]),
        "verify": lambda: main(["verify", str(folder)]),
        "generate": lambda: main(["generate", str(folder), "Once"]),
        "evaluate": lambda: main(["evaluate", str(folder), *text]),
        "permute": lambda: main(["permute", str(folder), str(out / "permuted")]),
        "card": lambda: main(["card", str(folder), "--push", "owner/name"]),
        "train": lambda: find_model(str(folder), "--model"),
        "copy": lambda: copy_other_files(folder, out),
    }


@pytest.mark.parametrize("link", LINKS)
def test_a_link_out_of_the_folder_is_refused_everywhere(
    cloned: Path, tmp_path: Path, link: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload.huggingface_hub, "HfApi", lambda: pytest.fail("the hub was asked"))
    out = tmp_path / "out"
    out.mkdir()
    (cloned / link).parent.mkdir(exist_ok=True)
    (cloned / link).symlink_to(tmp_path / ("keys" if link.endswith("templates") else "secret"))
    for name, read in _readers(cloned, out).items():
        try:
            assert read() == 2, name
            errors = capsys.readouterr().err
        except ValueError as error:
            errors = str(error)
        assert f"{link}: is a link to " in errors, (name, errors)
        assert "remove the link" in errors and errors.strip().count("\n") == 0
    assert not list(out.iterdir())


def test_a_link_within_the_folder_counts_as_a_file(cloned: Path, tmp_path: Path) -> None:
    (cloned / "LICENSE").write_text("free")
    (cloned / "NOTICE").symlink_to("LICENSE")
    (tmp_path / "named by a link").symlink_to(cloned)
    assert main(["export", str(tmp_path / "named by a link"), str(tmp_path / "out"), "--skip_proof"]) == 0
    assert (tmp_path / "out" / "NOTICE").read_text() == "free" and not (tmp_path / "out" / "NOTICE").is_symlink()


def _in_cache(folder: Path, cache: Path) -> Path:
    """Lay a folder out as the cache of the hub has it."""
    snapshot = cache / "models--owner--name" / "snapshots" / "abc"
    blobs = cache / "models--owner--name" / "blobs"
    for path in (snapshot, blobs):
        path.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_a_snapshot_of_the_hub_is_used_as_before(cloned: Path, tmp_path: Path) -> None:
    (cloned / "USE_POLICY.md").write_text("no harm")
    snapshot = _in_cache(cloned, tmp_path / "cache")
    assert find_model(str(snapshot), "--model").tokenizer.eos_token == "</s>"
    assert main(["export", str(snapshot), str(tmp_path / "out"), "--skip_proof"]) == 0
    assert (tmp_path / "out" / "USE_POLICY.md").read_text() == "no harm"
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    (snapshot / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"notes\.txt: is a link to .*secret"):
        find_model(str(snapshot), "--model")


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_that_names_a_file_elsewhere_is_refused(
    cloned: Path, tmp_path: Path, index: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keep the weights, so that only the index is wrong."""
    names = list(TensorFolder(cloned).specs)
    (cloned / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    write_json(cloned / index, {"metadata": {}, "weight_map": dict.fromkeys(names, "../elsewhere.safetensors")})
    for command in (["generate", str(cloned), "Once"], ["evaluate", str(cloned), "--text", "stdlib:heldout"]):
        assert main(command) == 2
        assert f"{index}: refers to '../elsewhere.safetensors', outside of its folder" in capsys.readouterr().err


@pytest.mark.parametrize("legal", LEGAL)
def test_files_with_terms_of_use_are_known_by_their_names(legal: bool) -> None:
    assert [name for name in LEGAL[legal] if is_legal_file(name) != legal] == []


def test_terms_of_use_travel_with_runs_and_exports(dense: Path, tmp_path: Path) -> None:
    terms = ["LICENSE", "LICENSE-CODE", "NOTICE", "USE_POLICY.md"]
    model = Path(shutil.copytree(dense, tmp_path / "model"))
    for name in (*terms, "README.md", "code.py", "source.spm"):
        (model / name).write_text(name)
    block = write_json(tmp_path / "ds.json", deepspeed_json(0))
    run = tmp_path / "run"
    text = write_text(tmp_path / "text.jsonl")
    flags = {"model": str(model), "dataset": [str(text)], "seq_length": 32, "output_dir": str(run)}
    spec = make_spec(RunArguments(deepspeed=str(block), **flags), 1)
    check_run_folder(spec)
    write_folder(spec)
    (tmp_path / "out").mkdir()
    copy_other_files(run / "model", tmp_path / "out")
    (tmp_path / "copy").mkdir()
    copy_other_files(model, tmp_path / "copy")
    assert (tmp_path / "copy" / "source.spm").exists()
    (tmp_path / "copy" / "source.spm").unlink()
    for folder in (run / "model", tmp_path / "out", tmp_path / "copy"):
        assert {path.name for path in folder.iterdir() if path.suffix != ".json"} == set(terms)


def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / ".lock").symlink_to("target")
    for use in (lambda: lock_folder(tmp_path), lambda: open_own_file(tmp_path / ".lock", os.O_WRONLY | os.O_TRUNC)):
        with pytest.raises(ValueError, match=r"\.lock: is a link, whose target is not written to; remove it"):
            use()
    assert (tmp_path / "target").read_text() == "precious"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("depth", [200, 100_000])
def test_settings_that_nest_too_deeply_are_refused(
    dense: Path, tmp_path: Path, file: str, depth: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(dense, tmp_path / "model"))
    content = json.loads((model / file).read_text()) if (model / file).exists() else {}
    (model / file).write_text(f'{json.dumps(content)[:-1]}{", " * bool(content)}"x": {"[" * depth}{"]" * depth}}}')
    with pytest.raises(ValueError, match=r"^--model ") as refused:
        print(find_model(str(model), "--model").tokenizer)
    assert len(str(refused.value)) < 500
    assert main(["generate", str(model), "Once"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("name", ["someone/kernel", {"text_config": "someone/kernel:flash"}])
def test_kernels_that_a_model_has_downloaded_and_run_are_refused(dense: Path, tmp_path: Path, name: Any) -> None:
    folder = Path(shutil.copytree(dense, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for key in ("attn_implementation", "_attn_implementation"):
        (folder / "config.json").write_text(json.dumps(config | {key: name}))
        with pytest.raises(ValueError, match=f"{key} is .*someone/kernel.*, whose code would be downloaded and run"):
            find_model(str(folder), "--model")


@pytest.mark.parametrize("value", ["x", [2, "x"], True, 2.5, {"a": 1}])
def test_ids_of_tokens_that_are_no_integers_are_refused(
    dense: Path, tmp_path: Path, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A string as id was a TypeError of generate."""
    folder = shutil.copytree(dense, tmp_path / "model")
    path = folder / "generation_config.json"
    for ids in (7, [7, 8], None):
        write_json(path, {"eos_token_id": ids})
        check_model_folder(folder)
    write_json(path, {"eos_token_id": value})
    assert main(["generate", str(folder), "Once"]) == 2
    expected = f"error: {path}: eos_token_id is {value!r}; use an integer, a list of integers, or null\n"
    assert capsys.readouterr().err == expected


def test_a_quantization_config_that_is_no_object_is_named(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(dense, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "quantization_config": "sparseforge_packed24"})
    text = str(write_text(tmp_path / "text.jsonl", 4))
    model = str(folder)
    for words in (
        ["evaluate", model, "--text", text],
        ["advise", model],
        ["bench", model],
        ["generate", model, "A dog"],
        ["train", "--model", model, "--deepspeed", "zero1", "--dataset", text, "--output_dir", str(tmp_path / "run")],
    ):
        assert main(words) != 0
        error = capsys.readouterr().err
        assert "quantization_config is 'sparseforge_packed24', and no JSON object; remove it if" in error, error
        assert error.count("error: ") == 1
    check_model_folder(dense)
    write_json(folder / "config.json", {**config, "quantization_config": None})
    check_model_folder(folder)
