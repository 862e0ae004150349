"""A model of the hub is loaded as its folder is: with the adapter beside its weights, unless told otherwise."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate.finished_model import find_adapter, load_model
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.model.pretrained import load_pretrained
from tests.pretend_hub import REVISION
from tests.tiny_folders import write_json, write_model, write_text

ID = "own/branched"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a model with an adapter that matters beside its weights."""
    made = write_model(tmp_path / "made")
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(made), lora).save_pretrained(made)
    config = json.loads((made / "adapter_config.json").read_text())
    write_json(made / "adapter_config.json", config | {"base_model_name_or_path": None})  # as an export has it
    return made


@pytest.mark.parametrize(
    ("leaf", "shape", "part"), [("low_rank_b", (32, 2), "low-rank branches"), ("weight_scale", (32,), "factors of out")]
)
def test_parts_that_transformers_leaves_out_are_errors_wherever_it_loads(
    leaf: str, shape: tuple[int, ...], part: str, tmp_path: Path
) -> None:
    """A Trainer's checkpoint has them among the weights; `consolidate` writes an adapter, or weights times factors."""
    folder = write_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.0.self_attn.q_proj.{leaf}"] = torch.zeros(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = rf"has {part}.*, model\.layers\.0\.self_attn\.q_proj\.{leaf} among them, which transf"
    with pytest.raises(ValueError, match=f"{folder}: {message}.*sparseforge consolidate"):
        load_model(str(folder))
    with pytest.raises(ValueError, match=f"teacher: {message}"):
        load_pretrained(folder, "teacher", torch.float32, None)
    notes = check_folder(folder).notes
    assert any(re.search(f"^{message}.*sparseforge consolidate", note) for note in notes), notes


@pytest.fixture
def snapshot(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the same as `ID` into the cache of the hub, which is not to be asked."""
    repository = tmp_path / "cache" / f"models--{ID.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return Path(shutil.copytree(folder, repository / "snapshots" / REVISION))


def test_weights_that_are_not_those_of_the_config_are_errors(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"intermediate_size": 72})
    loaders: list[Callable[[], object]] = [
        lambda: load_model(str(folder)),
        lambda: load_pretrained(folder, str(folder), torch.float32, None),
    ]
    for load in loaders:
        with pytest.raises(
            ValueError, match=r"down_proj\.weight has the shape \(32, \d+\) .* config\.json \(32, 72\); put back"
        ):
            load()
    write_json(folder / "config.json", config | {"num_hidden_layers": config["num_hidden_layers"] + 1})
    for load in loaders:
        with pytest.raises(ValueError, match=r"hold no model\.layers\.2\.input_layernorm\.weight, .* and 6 others"):
            load()


def test_an_adapter_on_the_hub_is_that_of_a_folder(
    folder: Path, snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ["--text", str(write_text(tmp_path / "text.jsonl", documents=4))]

    def measured(model: str, *flags: str) -> dict[str, Any]:
        assert main(["evaluate", model, *text, *flags]) == 0
        return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))

    own, bare = measured(ID), measured(ID, "--adapter", "none")
    assert (own["adapter"], bare["adapter"]) == (ID, None)
    for of_hub, flags in ((own, []), (bare, ["--adapter", "none"])):
        assert of_hub["perplexity"]["nll"] == measured(str(folder), *flags)["perplexity"]["nll"]
    assert abs(own["perplexity"]["nll"] - bare["perplexity"]["nll"]) > 1e-4
    assert measured(str(folder), "--adapter", ID)["perplexity"]["nll"] == own["perplexity"]["nll"]
    assert measured(ID, "--dense", str(folder))["perplexity"]["kl"] < 1e-6, "the dense model has its adapter, too"
    assert main(["evaluate", ID, *text, "--one_shot", "2:4"]) == 2
    assert f"--one_shot 2:4: {ID} is measured with its adapter, " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "peft", None)
    assert main(["evaluate", ID, *text]) == 2
    assert f"--adapter {ID}: peft is missing, which loads it; in the checkout pip install" in capsys.readouterr().err


def test_an_adapter_that_is_missing_on_the_hub_is_named(snapshot: Path) -> None:
    (snapshot / "adapter_config.json").unlink()
    assert find_adapter(ID, None) is None
    write_json(snapshot / "sparsity.json", {"adapter": {"rank": 4}})
    with pytest.raises(ValueError, match=f"{ID}: its low-rank adapter is missing"):
        find_adapter(ID, None)
    assert find_adapter(ID, "none") is None
    for nothing in ("nosuch", str(snapshot)):
        with pytest.raises(ValueError, match=f"--adapter {nothing}: has no adapter_config.json"):
            find_adapter(ID, nothing)
    assert find_adapter("no/model", None) is None  # which load_model will say
    with pytest.raises(ValueError, match="no/model: no such folder, and no model .*not in the cache, and HF_HUB_OFF"):
        load_model("no/model")


def test_plain_transformers_loads_both_once_the_adapter_names_the_model(folder: Path, snapshot: Path) -> None:
    """Name the model as `sparseforge card --push` does."""
    config = json.loads((snapshot / "adapter_config.json").read_text())
    write_json(snapshot / "adapter_config.json", config | {"base_model_name_or_path": ID})
    ids = torch.arange(9)[None]
    logits, expected = (AutoModelForCausalLM.from_pretrained(name)(ids).logits for name in (ID, folder))
    assert torch.equal(logits, expected)
