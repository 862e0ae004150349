"""vLLM with our plugin: a packed24 folder gives the greedy tokens of vLLM's dense run of the `hf` export.

vLLM wants other versions of torch and transformers than training does, so it has an environment of its own
(docs/guides/vllm.md), and SPARSEFORGE_VLLM_PYTHON names its interpreter. Each run starts an engine: 20 seconds or more.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparseforge_ds.export.formats import export
from tests.distributed import PATIENCE, ROOT
from tests.sparse_folders import ModelSource
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer
from tests.tiny_models import BUILDERS

PYTHON = os.environ.get("SPARSEFORGE_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None,
    reason="needs SPARSEFORGE_VLLM_PYTHON, the interpreter of an environment with vLLM (docs/guides/vllm.md)",
)
PROMPTS = [[1, 5, 9, 33], [1, 100, 7], [1, 200, 30, 31, 32, 33, 34, 35]]
EAGER: dict[str, Any] = {"enforce_eager": True, "dtype": "float32"}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The entry points of pyproject.toml, as an installation has them; the code is that of this checkout."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("plugin")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "sparseforge_ds").mkdir()
    (source / "sparseforge_ds" / "__init__.py").touch()
    command = [str(PYTHON), "-c", "import setuptools; setuptools.setup()", "-q", "egg_info", "--egg-base", str(made)]
    subprocess.run(command, cwd=source, check=True, timeout=PATIENCE)
    return made


def exports(folder: Path, model: PreTrainedModel, dense: Path) -> dict[str, Path]:
    """The model under its magnitude mask, in both formats."""
    made = {format: folder / format for format in ("hf", "packed24")}
    for format, out in made.items():
        export(ModelSource(model, dense, torch.float32), out, format, skip_proof=True)
    return made


def tiny(folder: Path, family: str, **sizes: Any) -> dict[str, Path]:
    model = BUILDERS[family](vocab_size=BYTE_VOCABULARY, **sizes)
    model.save_pretrained(folder / "dense")
    byte_tokenizer().save_pretrained(folder / "dense")
    return exports(folder, model, folder / "dense")


@pytest.fixture(scope="module")
def books(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama that was trained on text."""
    dense = assets / "models" / "books-6m"
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    return exports(tmp_path_factory.mktemp("books"), model, dense)


def run(plugin: Path, model: Path, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """An engine of vLLM in a process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(plugin))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the worker's question goes to vLLM's other processes
    }
    if options.get("tensor_parallel_size") == 2:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    command = [
        str(PYTHON),
        str(ROOT / "tests" / "vllm_tokens.py"),
        str(model),
        json.dumps(options),
        json.dumps(PROMPTS),
    ]
    return subprocess.run(command, cwd=model.parent, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def tokens(plugin: Path, model: Path, options: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
    """What it generates, and how many layers have which method."""
    done = run(plugin, model, options)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"tokens"'))
    answer = json.loads(line)
    assert len({json.dumps(methods) for methods in answer["methods"]}) == 1  # of each rank
    return answer["tokens"], answer["methods"][0]


@pytest.fixture(scope="module")
def books_dense(plugin: Path, books: dict[str, Path]) -> list[list[int]]:
    found, methods = tokens(plugin, books["hf"], EAGER)
    assert not any("Packed24" in name for name in methods)
    return found


@pytest.mark.parametrize("options", [{}, {"enforce_eager": False}, {"tensor_parallel_size": 2}], ids=str)
def test_llama(plugin: Path, books: dict[str, Path], books_dense: list[list[int]], options: dict[str, Any]) -> None:
    """qkv and gate-up are one layer each: four a block."""
    found, methods = tokens(plugin, books["packed24"], {**EAGER, **options})
    assert found == books_dense
    assert methods["Packed24LinearMethod"] == 4 * 6 and "UnquantizedLinearMethod" not in methods


@pytest.mark.parametrize(
    ("family", "sizes", "expected"),
    [
        ("gpt2", {"n_embd": 64, "n_head": 2}, {"Packed24LinearMethod": 8}),
        (
            "qwen3_moe",
            {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 64},
            {"Packed24LinearMethod": 6, "UnquantizedLinearMethod": 1, "Packed24Experts": 1},  # the router
        ),
    ],
)
def test_other_families(
    tmp_path: Path, plugin: Path, family: str, sizes: dict[str, Any], expected: dict[str, int]
) -> None:
    """GPT-2 stores its inputs first; experts are unpacked, for which vLLM's CPU kernel wants bf16."""
    made = tiny(tmp_path, family, **sizes)
    options = {**EAGER, "dtype": "bfloat16"} if family == "qwen3_moe" else EAGER
    found, methods = tokens(plugin, made["packed24"], options)
    assert found == tokens(plugin, made["hf"], options)[0]
    assert {name: count for name, count in methods.items() if "Embedding" not in name} == expected


def test_half_a_byte_of_positions_is_refused(tmp_path: Path, plugin: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 88, "num_attention_heads": 2, "num_key_value_heads": 2}
    made = tiny(tmp_path, "llama", **sizes)
    done = run(plugin, made["packed24"], {**EAGER, "tensor_parallel_size": 2})
    assert done.returncode != 0
    assert "down_proj: its 88 inputs, divided among tensor-parallel ranks, are 44 each" in done.stdout + done.stderr
