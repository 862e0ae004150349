"""Both kinds of source: what they give out, and what they refuse."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from benchmarks.sharded_checkpoint import write_run
from sparseforge_ds.export.folder_source import FolderSource
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.run_source import RunSource
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.model.registration import load_config
from sparseforge_ds.model.stored_config import config_sha256

DOWN = "model.layers.1.mlp.down_proj.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "run"
    config = Qwen3Config(
        vocab_size=70,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    write_run(folder, config, ranks=3)
    return folder


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    export(open_source(run), out, max_shard_size="20KB", skip_proof=True)
    return out


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "model")
    return tmp_path / "model"


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_run_and_its_export_give_the_same(run: Path, exported: Path) -> None:
    first, second = open_source(run), open_source(exported)
    assert isinstance(first, RunSource) and isinstance(second, FolderSource)
    assert first.specs == second.specs and first.prunable == second.prunable and len(first.prunable) == 14
    assert first.pattern == second.pattern and first.dtype == second.dtype == torch.bfloat16
    assert first.record == second.record
    for name, spec in first.specs.items():
        assert torch.equal(first.read(name), second.read(name))
        assert first.read(name).dtype == spec.dtype and tuple(first.read(name).shape) == spec.shape


@pytest.mark.parametrize("kind", ["run", "folder"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_source_has_the_chosen_dtype(run: Path, exported: Path, kind: str, dtype: str) -> None:
    wanted = getattr(torch, dtype)
    source = open_source(run if kind == "run" else exported, dtype=dtype)
    assert source.record["dtype"] == dtype and source.dtype == wanted
    value = source.read(DOWN)
    assert value.dtype == wanted == source.specs[DOWN].dtype
    assert torch.equal(value, open_source(run if kind == "run" else exported, dtype="float32").read(DOWN).to(wanted))
    assert not torch.signbit(value[value == 0]).any()


def test_small_negative_values_do_not_become_negative_zero(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for file in (copy / "checkpoints").glob("*/*optim_states.pt"):
        content = torch.load(file, weights_only=False)
        content["optimizer_state_dict"]["fp32_flat_groups"][0].mul_(1e-7)
        torch.save(content, file)
    value = open_source(copy, dtype="float16").read(DOWN)
    assert (value == 0).sum() > value.numel() / 2 + 10  # some vanished in fp16
    assert not torch.signbit(value[value == 0]).any()


def test_a_head_that_is_tied_where_config_json_does_not_say_so(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    model = shutil.copytree(run / "model", tmp_path / "model")
    assert "lm_head.weight" not in open_source(copy, model).specs
    for folder in (model, copy / "model"):
        edit_json(folder / "config.json", lambda c: c.pop("tie_word_embeddings"))
    content = json.loads((copy / "model" / "config.json").read_text())
    edit_json(copy / "sparseforge.json", lambda c: c.update(config_sha256=config_sha256(content)))
    config = load_config(model, "it")
    assert ("lm_head.weight" not in open_source(copy, model).specs) == config.tie_word_embeddings


def test_a_given_model_is_the_one_that_the_run_trained(run: Path, exported: Path, tmp_path: Path) -> None:
    """Another base of the rotary embedding has the same shapes, and is another model."""
    model = Path(shutil.copytree(run / "model", tmp_path / "model"))
    edit_json(model / "config.json", lambda c: c.update(dtype="float32", use_cache=False, transformers_version="0"))
    edit_json(model / "config.json", lambda c: c.update(eos_token_id=7, auto_map={"AutoModel": "code.Model"}))
    assert open_source(run, model).dtype == torch.float32
    edit_json(model / "config.json", lambda c: c.update(rms_norm_eps=0.5))
    own = re.escape(str(run / "model" / "config.json"))
    message = rf"^--model {model}: its config.json has rms_norm_eps 0.5, and .* 1e-06 \({own}\); leave out --model, or"
    with pytest.raises(ValueError, match=message):
        open_source(run, model)
    # So is that of an export.
    with pytest.raises(ValueError, match=r"its config.json has rms_norm_eps 0.5, and .* 1e-06"):
        open_source(exported, model)
    # The run's own file may have been changed: it is no measure then, and the model that the run began with is.
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    content = json.loads((run / "model" / "config.json").read_text())
    edit_json(copy / "sparseforge.json", lambda c: c.update(config_sha256=config_sha256(content)))
    edit_json(copy / "model" / "config.json", lambda c: c.update(rms_norm_eps=0.5))
    for other in (model, copy / "model"):
        with pytest.raises(ValueError, match=f"^{copy}/model/config.json: was changed or damaged .*; restore it"):
            open_source(copy, other)
    assert open_source(copy, run / "model").model_folder == run / "model"


def test_threads_read_the_same(run: Path) -> None:
    source = open_source(run)
    names = list(source.specs) * 5
    with ThreadPoolExecutor(4) as pool:
        values = list(pool.map(source.read, names))
    assert all(torch.equal(value, source.read(name)) for name, value in zip(names, values, strict=True))


def test_an_export_of_an_export_is_the_same(exported: Path, tmp_path: Path) -> None:
    export(open_source(exported), tmp_path / "again", max_shard_size="20KB", workers=2, skip_proof=True)
    names = sorted(path.name for path in exported.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert all((exported / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_a_packed_folder_gives_dense_weights(run: Path, exported: Path, tmp_path: Path) -> None:
    export(open_source(run), tmp_path / "packed", "packed24", skip_proof=True)
    report = check_folder(tmp_path / "packed", workers=2)
    assert report.ok and len(report.rows) == 14 and report.rows == check_folder(exported).rows
    source = open_source(tmp_path / "packed")
    assert "quantization_config" not in source.model_config
    assert all(torch.equal(source.read(name), open_source(run).read(name)) for name in source.specs)
    export(source, tmp_path / "dense", max_shard_size="20KB", skip_proof=True)
    assert (tmp_path / "dense" / "config.json").read_bytes() == (exported / "config.json").read_bytes()
    assert check_folder(tmp_path / "dense").ok


@pytest.mark.parametrize("name", [DOWN, EMBED])
def test_changed_bytes_are_refused_when_they_are_read(folder: Path, name: str) -> None:
    file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name].view(-1)[0] += 1
    save_file(tensors, file, {"format": "pt"})
    source = open_source(folder)
    with pytest.raises(ValueError, match=f"{name} has not the bytes that sparsity.json gives the sha256 of"):
        source.read(name)


def test_a_folder_that_does_not_fit_its_record_is_refused(folder: Path) -> None:
    sparsity = (folder / "sparsity.json").read_text()
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "has no step; it was not written by consolidate": lambda c: c.pop("step"),
        f"{DOWN} is not in both": lambda c: c["weights"].pop(DOWN),
        f"{DOWN} has not the shape": lambda c: c["weights"][DOWN].update(shape=[32, 65]),
        "weights is damaged": lambda c: c["weights"][DOWN].update(input_axis=0),
        "dense is damaged": lambda c: c.update(dense=[1]),
        "unknown pattern": lambda c: c.update(pattern="two of four"),
        "dtype": lambda c: c.update(dtype=["float32"]),
        "source is damaged; export again": lambda c: c.update(source="x"),
        "run is damaged; export again": lambda c: c.update(run=[3]),
        "step is damaged; export again": lambda c: c.update(step="x"),
        "config is damaged; export again": lambda c: c.update(config=[1]),
        "coverage is damaged; export again": lambda c: c.update(coverage=5),
        "run.dataset is damaged; export again": lambda c: c["run"].update(dataset=3),
        r"config is damaged, or of another release \(.*low_rank.*\)": lambda c: c["config"].update(low_rank=5),
    }
    for message, change in changes.items():
        (folder / "sparsity.json").write_text(sparsity)
        edit_json(folder / "sparsity.json", change)
        with pytest.raises(ValueError, match=message):
            open_source(folder)


def test_a_run_that_does_not_fit_its_state_is_refused(run: Path, tmp_path: Path) -> None:
    first = sorted((run / "checkpoints").glob("*/*model_states.pt"))[0]
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "a sparseforge state with a damaged step: None": lambda c: c["sparseforge"].pop("step"),
        "lists a damaged weight": lambda c: c["sparseforge"]["weights"][3].update(input_axis=1),
        "is missing, its sparseforge state says": lambda c: c["sparseforge"]["weights"][3].update(name="a"),
        r"is \(32, 64\), its sparseforge state says \(64, 32\)": lambda c: c["sparseforge"]["weights"][6].update(
            shape=[64, 32]
        ),
        "cannot be 2:10: its input axis": lambda c: c["sparseforge"]["config"].update(pattern="2:10"),
    }
    for number, (message, change) in enumerate(changes.items()):
        copy = tmp_path / str(number)
        shutil.copytree(run, copy)
        content = torch.load(first, weights_only=False)
        change(content)
        torch.save(content, copy / first.relative_to(run))
        with pytest.raises(ValueError, match=message):
            open_source(copy)


def test_a_damaged_description_of_a_run_is_named_before_an_export(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    path = copy / "sparseforge.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "coverage": 5}))
    with pytest.raises(ValueError, match=f"^{path}: coverage is damaged; restore the file$"):
        open_source(copy)
    names = {"model": "owner/name", "dataset": 3}
    path.write_text(json.dumps({**content, "run": {}, "public_names": names}))
    run_record = open_source(copy).record["run"]
    assert run_record["dataset"] == [] and run_record["model"] == "owner/name"


def test_a_mask_that_should_be_frozen_and_is_not(run: Path, tmp_path: Path) -> None:
    for number, value in enumerate((0.5, 1.0, float("nan"), None)):
        copy = tmp_path / str(number)
        shutil.copytree(run, copy)
        file = sorted((copy / "checkpoints").glob("*/*optim_states.pt"))[0]
        content = torch.load(file, weights_only=False)
        if value is None:
            content["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["kept"][0] ^= 1
        else:
            master = content["optimizer_state_dict"]["fp32_flat_groups"][0]
            master[master.abs().argmin()] = value
        message = "is not 2:4 although its mask was" if value is None else "is not mask * dense"
        torch.save(content, file)
        source = open_source(copy)
        broken = []
        for name in source.prunable:
            try:
                source.read(name)
            except ValueError as error:
                assert message in str(error)
                broken.append(name)
        assert len(broken) == 1
        with pytest.raises(ValueError, match="although its mask (was|is) frozen"):
            export(source, tmp_path / "out", skip_proof=True)
        assert not (tmp_path / "out").exists()
