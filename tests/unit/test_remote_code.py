"""Code of a model's folder, which does not run: every load has `trust_remote_code=False`, and planted files stay."""

from __future__ import annotations

import ast
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseforge_ds.cli.main import main as sparseforge
from sparseforge_ds.config.block_sections import DistillationConfig
from sparseforge_ds.evaluate.finished_model import load_model
from sparseforge_ds.model.pretrained import find_model
from sparseforge_ds.model.teacher import Teacher
from sparseforge_ds.model.tokenizer import read_tokenizer
from tests.planted_code import YES, Touch, plant_generate, plant_model, plant_pickle, plant_tokenizer
from tests.task_files import write_task
from tests.tiny_folders import write_model, write_text

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(file for folder in ("sparseforge_ds", "launch", "benchmarks") for file in (ROOT / folder).rglob("*.py"))

LOADS = {"from_pretrained", "from_config", "HFLM", "pipeline"}
"""Calls that run code of a folder or repository when they are let."""
HARMLESS = {
    "GenerationConfig",  # numbers
    "PeftModel",  # tensors, for a model that is there
    "Teacher",  # ours, which loads as all of this package does
}
PICKLES = {"pickle.load", "pickle.loads", "hub.load", "joblib.load", "dill.load"}


def unsafe_loads(code: str) -> Iterator[str]:
    """Return every call in Python code that could run what lies beside a model."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        message = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        owner, _, name = called.rpartition(".")
        asked = name in LOADS and owner.rpartition(".")[2] not in HARMLESS
        if message.get("trust_remote_code", "None" if asked else "False") != "False":
            yield f"line {node.lineno}: {called} without trust_remote_code=False"
        if called.endswith("torch.load") and message.get("weights_only") != "True":
            yield f"line {node.lineno}: {called} without weights_only=True"
        if any(called.endswith(name) for name in PICKLES) or message.get("allow_pickle", "False") != "False":
            yield f"line {node.lineno}: {called} executes a pickle"
        if name == "simple_evaluate" and not isinstance(next(iter(node.args), None), ast.Name):
            yield f"line {node.lineno}: {called} loads a model by itself"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_load_runs_remote_code(path: Path) -> None:
    assert list(unsafe_loads(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "AutoConfig.from_pretrained(folder)",
        "transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=args.trust)",
        "def f():\n    return LlamaForCausalLM.from_pretrained(folder, **kwargs)",
        "HFLM(pretrained=model)",
        "load_dataset('owner/name', trust_remote_code=True)",
        "simple_evaluate('hf', model_args='pretrained=x')",
        "torch.load(file)",
        "numpy.load(file, allow_pickle=True)",
        "pickle.load(file)",
    ],
)
def test_the_search_finds_what_it_is_for(code: str) -> None:
    assert len(list(unsafe_loads(code))) == 1


def test_datasets_run_no_scripts() -> None:
    """Since version 4 the library has none, so its loads need no flag."""
    assert '"datasets>=4' in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model folder, for a user who says yes to every question."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(YES))
    return write_model(tmp_path / "dense")


def every_command(planted: str, dense: str, text: str) -> dict[str, Callable[[], Any]]:
    items = ["--tasks", "piqa", "--include_path", str(write_task(Path(text).parent, "piqa", Path(text)))]
    json_file = str(ROOT / "ds_configs" / "zero3.json")
    return {
        "train": lambda: find_model(planted, "--model"),
        "teacher": lambda: find_model(planted, "--teacher"),
        "own loop": lambda: Teacher.from_pretrained(planted, DistillationConfig(hold="replicated"), {}),
        "advise": lambda: sparseforge(["advise", planted]),
        "plan": lambda: sparseforge(["plan", "--model", planted, "--gpus", "2", "--deepspeed", json_file]),
        "perplexity": lambda: sparseforge(["evaluate", planted, "--text", text]),
        "zero_shot": lambda: sparseforge(["evaluate", planted, *items]),
        "dense beside": lambda: sparseforge(["evaluate", dense, "--dense", planted, *items]),
        "verify": lambda: sparseforge(["verify", planted]),
        "export": lambda: sparseforge(["export", planted, f"{planted}.out"]),
        "export of a mask": lambda: sparseforge(["export", f"{planted}.mask", f"{planted}.out", "--model", planted]),
    }


def test_a_model_that_brings_its_code_is_refused(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = plant_model(tmp_path / "planted", dense)
    (tmp_path / "items.jsonl").write_text(
        json.dumps({"text": "a", "goal": "a", "sol1": "b", "sol2": "c", "label": 0}) + "\n"
    )
    for name, command in every_command(str(tmp_path / "planted"), str(dense), str(tmp_path / "items.jsonl")).items():
        try:
            code = command()
            message = capsys.readouterr().err
            assert code in (1, 2), name
        except ValueError as error:
            message = f"error: {error}\n"
        assert not mark.exists(), f"{name} ran the planted code"
        if name not in ("verify", "export", "export of a mask"):  # which load no model
            (line,) = [line for line in message.splitlines() if line.startswith("error: ")]
            assert "planted" in line and "needs Python code of its own (auto_map" in line, line
            assert "no remote code is run here; give a model of a family" in line and "trust_remote_code" not in line


def test_a_tokenizer_that_brings_its_code_is_refused(dense: Path, tmp_path: Path) -> None:
    mark = plant_tokenizer(tmp_path / "planted", dense)
    with pytest.raises(ValueError, match="its tokenizer cannot be read .it needs Python code of its own"):
        read_tokenizer(tmp_path / "planted")
    assert not mark.exists()


def test_what_else_may_lie_in_a_folder_does_not_run(dense: Path, tmp_path: Path) -> None:
    generate, pickled = (
        plant(tmp_path / name, dense) for name, plant in (("generate", plant_generate), ("pickle", plant_pickle))
    )
    load_model(str(tmp_path / "generate")).generate(torch.tensor([[1]]), max_new_tokens=1)
    with pytest.raises(ValueError, match="cannot be loaded as a causal .* a pickle .* give its weights in safetensors"):
        load_model(str(tmp_path / "pickle"))
    with pytest.raises(ValueError, match="weights are read from safetensors files"):
        find_model(str(tmp_path / "pickle"), "--model")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}')
    torch.save({"a": Touch(tmp_path / "adapter.ran")}, adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match="--adapter .*cannot be put on"):
        load_model(str(dense), adapter=str(adapter))
    assert not generate.exists() and not pickled.exists() and not (tmp_path / "adapter.ran").exists()


def test_a_family_that_transformers_has_needs_no_code_of_its_own(dense: Path, tmp_path: Path) -> None:
    """Many models on the hub still name the files that they came with before transformers had their class."""
    mark = plant_model(tmp_path / "planted", dense)
    config = json.loads((tmp_path / "planted" / "config.json").read_text())
    (tmp_path / "planted" / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    shutil.copy(dense / "tokenizer_config.json", tmp_path / "planted")
    result = find_model(str(tmp_path / "planted"), "--model")
    assert result.tokenizer("a")["input_ids"]
    assert type(load_model(str(tmp_path / "planted"))).__module__.startswith("transformers.")
    assert sparseforge(["evaluate", str(result.folder), "--text", str(write_text(tmp_path / "text.jsonl"))]) == 0
    assert not mark.exists()
