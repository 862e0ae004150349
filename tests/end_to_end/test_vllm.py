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

import sparseforge_ds.extras.packed24  # noqa: F401  registers the format with transformers
from sparseforge_ds.export.formats import export
from sparseforge_ds.packed_format.packed_values import Grid
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
WIDE = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 64,
}
"""Sizes of a tiny mixture, so that vLLM's kernels take it."""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the entry points of pyproject.toml, as an installation has them, for the code of this checkout."""
    source = tmp_path_factory.mktemp("source")
    made = tmp_path_factory.mktemp("plugin")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "sparseforge_ds").mkdir()
    (source / "sparseforge_ds" / "__init__.py").touch()
    command = [str(PYTHON), "-c", "import setuptools; setuptools.setup()", "-q", "egg_info", "--egg-base", str(made)]
    subprocess.run(command, cwd=source, check=True, timeout=PATIENCE)
    return made


ROUNDED = {"int8": Grid("int8"), "fp8_e4m3": Grid("fp8_e4m3"), "int4": Grid("int4", 16)}
"""Rounded values; a rank of two has half the scales of int4 where the inputs are divided."""


def exports(folder: Path, model: PreTrainedModel, dense: Path) -> dict[str, Path]:
    """Export the model under its magnitude mask in both formats, and packed with each kind of rounded values."""
    made = {}
    for name, format, grid in (
        ("hf", "hf", None),
        ("packed24", "packed24", None),
        *((name, "packed24", grid) for name, grid in ROUNDED.items()),
    ):
        made[name] = folder / name
        export(ModelSource(model, dense, torch.float32), made[name], format, skip_proof=True, grid=grid)
    return made


def tiny(folder: Path, family: str, **sizes: Any) -> dict[str, Path]:
    model = BUILDERS[family](vocab_size=BYTE_VOCABULARY, **sizes)
    model.save_pretrained(folder / "dense")
    byte_tokenizer().save_pretrained(folder / "dense")
    return exports(folder, model, folder / "dense")


@pytest.fixture(scope="module")
def books(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a Llama that was trained on text."""
    dense = assets / "models" / "books-6m"
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    return exports(tmp_path_factory.mktemp("books"), model, dense)


def run(plugin: Path, model: Path, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run an engine of vLLM in a process of its own."""
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


def answer(plugin: Path, model: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return what `vllm_tokens` prints."""
    process = run(plugin, model, options)
    assert process.returncode == 0, process.stderr[-4000:]
    (line,) = (line for line in process.stdout.splitlines() if line.startswith('{"tokens"'))
    printed: dict[str, Any] = json.loads(line)
    assert len({json.dumps(methods) for methods in printed["methods"]}) == 1  # of each rank
    return printed


def tokens(plugin: Path, model: Path, options: dict[str, Any]) -> tuple[list[list[int]], dict[str, int]]:
    """Return the tokens that it generates, and the number of layers by method."""
    printed = answer(plugin, model, options)
    return printed["tokens"], printed["methods"][0]


@pytest.fixture(scope="module")
def books_dense(plugin: Path, books: dict[str, Path]) -> list[list[int]]:
    generated, methods = tokens(plugin, books["hf"], EAGER)
    assert not any("Packed24" in name for name in methods)
    return generated


@pytest.mark.parametrize("options", [{}, {"enforce_eager": False}, {"tensor_parallel_size": 2}], ids=str)
def test_a_packed_llama_generates_as_the_dense_one(
    plugin: Path, books: dict[str, Path], books_dense: list[list[int]], options: dict[str, Any]
) -> None:
    """qkv and gate-up are one layer each: four a block."""
    generated, methods = tokens(plugin, books["packed24"], {**EAGER, **options})
    assert generated == books_dense
    assert methods["Packed24LinearMethod"] == 4 * 6 and "UnquantizedLinearMethod" not in methods


def test_gpt2_stores_its_inputs_first(tmp_path: Path, plugin: Path) -> None:
    made = tiny(tmp_path, "gpt2", n_embd=64, n_head=2)
    generated, methods = tokens(plugin, made["packed24"], EAGER)
    assert generated == tokens(plugin, made["hf"], EAGER)[0]
    assert {name: count for name, count in methods.items() if "Embedding" not in name} == {"Packed24LinearMethod": 8}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a model whose second layer has four experts."""
    return tiny(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **WIDE)


def greedy(folder: Path) -> list[list[int]]:
    """Return what transformers generates in fp32, for which vLLM has no dense experts on a CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generated = []
    for prompt in PROMPTS:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
        generated.append(ids[0, len(prompt) :].tolist())
    return generated


@pytest.fixture(scope="module")
def mixture_tokens(mixture: dict[str, Path]) -> list[list[int]]:
    return greedy(mixture["hf"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": False},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=str,
)
def test_experts_stay_packed(
    plugin: Path, mixture: dict[str, Path], mixture_tokens: list[list[int]], options: dict[str, Any]
) -> None:
    printed = answer(plugin, mixture["packed24"], {**EAGER, **options})
    assert printed["tokens"] == mixture_tokens
    methods = {name: count for name, count in printed["methods"][0].items() if "Embedding" not in name}
    assert methods == {
        "Packed24LinearMethod": 6,
        "UnquantizedLinearMethod": 1,
        "Packed24ExpertsMethod": 1,
    }  # the router
    assert sum(printed["bytes of experts"]) == (0.5 + 1 / 32) * 4 * (4 * 3 * 64 * 64)  # of fp32


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe"])
def test_other_mixtures_generate_as_transformers_does(tmp_path: Path, plugin: Path, family: str) -> None:
    """Generate with mixtures that have shared experts beside the routed ones, and without."""
    made = tiny(tmp_path, family, **WIDE)
    printed = answer(plugin, made["packed24"], EAGER)
    assert printed["tokens"] == greedy(made["hf"])
    assert printed["methods"][0]["Packed24ExpertsMethod"] and "UnquantizedFusedMoEMethod" not in printed["methods"][0]


def test_experts_in_bf16_are_those_of_the_dense_run(plugin: Path, mixture: dict[str, Path]) -> None:
    options = {**EAGER, "dtype": "bfloat16"}
    packed, dense = (answer(plugin, mixture[format], options) for format in ("packed24", "hf"))
    assert packed["tokens"] == dense["tokens"]
    assert packed["bytes of experts"][0] == 0.5625 * dense["bytes of experts"][0]


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("grid", ROUNDED)
def test_rounded_values_generate_what_transformers_does(
    plugin: Path, books: dict[str, Path], mixture: dict[str, Path], grid: str, options: dict[str, Any]
) -> None:
    """Scales are divided with the rows of a layer, and are whole where its inputs are divided."""
    generated, methods = tokens(plugin, books[grid], {**EAGER, **options})
    assert generated == greedy(books[grid])
    assert methods["Packed24LinearMethod"] == 4 * 6
    experts = answer(plugin, mixture[grid], {**EAGER, **options})
    # Weights of the mixture are random, so that roundings may decide between near tokens late in an answer.
    expected = greedy(mixture[grid])
    assert [ids[:12] for ids in experts["tokens"]] == [ids[:12] for ids in expected]
    assert grid != "int8" or experts["tokens"] == expected
    # Of four experts: a byte or half of one a kept value, a bit a weight, and scales; of w2 a row's are on each rank.
    weights = 4 * 3 * 64 * 64
    scales = 4 * 4 * (2 * 64 + 64 * options.get("tensor_parallel_size", 1))
    if grid == "int4":  # two of 16 bits a row
        scales = 4 * 4 * 3 * 64
    assert sum(experts["bytes of experts"]) == (1 / (4 if grid == "int4" else 2) + 1 / 8) * weights + scales


def test_rounded_values_whose_inputs_are_stored_first(tmp_path: Path, plugin: Path) -> None:
    made = tiny(tmp_path, "gpt2", n_embd=64, n_head=2)
    for grid in ROUNDED:
        assert tokens(plugin, made[grid], EAGER)[0] == greedy(made[grid])


def test_half_a_byte_of_positions_is_refused(tmp_path: Path, plugin: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 88, "num_attention_heads": 2, "num_key_value_heads": 2}
    made = tiny(tmp_path, "llama", **sizes)
    process = run(plugin, made["packed24"], {**EAGER, "tensor_parallel_size": 2})
    assert process.returncode != 0
    assert (
        "down_proj: its 88 inputs, divided among tensor-parallel ranks, are 44 each" in process.stdout + process.stderr
    )
