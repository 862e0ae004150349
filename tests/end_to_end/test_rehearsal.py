"""benchmarks/rehearsal.py by its command line, at widths that only show that every step and every number is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import rehearsal, rehearsal_model
from benchmarks.rank_memory import RankMemory
from benchmarks.rehearsal_report import report
from tests.distributed import PATIENCE, ROOT


def rehearse(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command on processors, with the folder's name from its parent."""
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "rehearsal.py"), folder.name, *arguments],
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_a_rehearsal_of_a_mixture_measures_every_phase(tmp_path: Path) -> None:
    """Rehearse a dense layer and one with experts; everything but our own states is bf16."""
    small = [
        "--shrink=16",
        "--experts=8",
        "--seq_length=16",
        "--steps=6",
        "--memory=4",
        "--full_gpus=8",
        "--bf16_states",
    ]
    # Two layers of a small mixture, on two ranks.
    process = rehearse(
        tmp_path / "scratch", "--model=deepseek_moe_16b", "--layers", "2", *small, f"--json={tmp_path / 'r.json'}"
    )
    assert process.returncode == 0, process.stderr[-4000:]
    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    assert [run["layers"] for run in result["runs"]] == [2] and result["ranks"] == 2
    # Every phase has steps and seconds; memory, saving and the tools after it have numbers.
    for run in result["runs"]:
        assert run["phases"].keys() >= {"heating", "hardening", "finetuning", "heating, mask update"}
        assert sum(phase["steps"] for phase in run["phases"].values()) == 6
        assert all(phase["seconds"] > 0 for phase in run["phases"].values())
        memory = run["memory"]
        assert memory["own_by_moment"].keys() == {"load, first step", "heating", "hardening", "frozen", "save"}
        assert 0 < memory["before"] < max(memory["own_by_moment"].values()) <= memory["peak_resident"]
        assert memory["all_ranks"] <= 2 * max(memory["own_by_moment"].values())
        assert run["save"]["bytes"] > 12 * run["masked"]  # moments and our states
        assert min(run[name]["seconds"] for name in ("consolidate", "verify")) > 0
    # What was measured is carried to the full depth, and the report says what it was.
    full = result["full_depth"]
    assert full["layers"] == 28 and full["parameters"] == 16_375_728_128
    assert "2 layers, " in process.stdout and "full depth: 28 layers" in process.stdout
    assert "ZeRO-3, bf16" in process.stdout and "ZeRO-2, bf16" in report({**result, "stage": 2})
    assert not list((tmp_path / "scratch").iterdir())  # all that was written is gone


def test_what_does_not_fit_is_said_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model=qwen3_14b", "--layers=3", "--memory=20", "--ranks=2"]
    assert rehearsal.main([str(tmp_path / "scratch"), *arguments]) == 2
    error = capsys.readouterr().err
    assert "error: --layers 3: 3 layers of qwen3_14b take" in error and "use fewer --layers" in error
    assert not list((tmp_path / "scratch").iterdir())


def test_full_depth_lies_on_a_straight_line(tmp_path: Path) -> None:
    arguments = rehearsal.parse_arguments([str(tmp_path), "--model=deepseek_moe_16b", "--ranks=2"])
    runs = [{"layers": n, "phases": {"heating": {"seconds": 3.0 + 0.5 * n}}} for n in (2, 4)]
    full = rehearsal.full_depth(arguments, runs)
    assert full["parameters"] == 16_375_728_128
    assert full["seconds_per_layer"] == {"heating": pytest.approx(0.5)}
    assert full["seconds"] == {"heating": pytest.approx(3.0 + 0.5 * 28)}
    # The line is that of layers with as many experts as were measured.
    settings = {"experts": 16, "shrink": 1, "micro_batch": 1, "seq_length": 64, "vocabulary": 1024}
    result = {"model": "deepseek_moe_16b", "device": "cpu", "ranks": 2, "stage": 3, "runs": [], "full_depth": full}
    assert "17.00 s a step on these 2 ranks: 0.50 a layer of 16 experts\n" in report({**result, "settings": settings})
    with_all_experts = report({**result, "settings": {**settings, "experts": None}})
    assert "17.00 s a step on these 2 ranks: 0.50 a layer\n" in with_all_experts


def test_a_dense_layer_is_not_taken_for_a_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--shrink=16", "--experts=8", "--seq_length=16", "--memory=4", "--ranks=2"]
    assert rehearsal.main([str(tmp_path), "--model=deepseek_moe_16b", "--layers", "2", "1", *small]) == 2
    assert capsys.readouterr().err.endswith("; use depths of 2 or more, or 1 alone\n")
    assert not list(tmp_path.iterdir())
    for model, depths in (("deepseek_moe_16b", [1]), ("deepseek_moe_16b", [2, 3]), ("qwen3_14b", [1, 2])):
        rehearsal.check_depths(model, depths)


def test_as_many_layers_as_fit(tmp_path: Path) -> None:
    arguments = rehearsal.parse_arguments(
        [str(tmp_path), "--model=qwen3_14b", "--layers=fit", "--shrink=8", "--memory=2", "--ranks=2"]
    )
    layers = rehearsal.depth_of("fit", arguments)
    assert layers == 4
    with pytest.raises(ValueError, match=f"{layers + 1} layers of qwen3_14b take"):
        rehearsal.depth_of(str(layers + 1), arguments)


def test_a_layer_has_the_published_shapes() -> None:
    config = rehearsal_model.rehearsal_config("deepseek_moe_16b", 1, 1024, None, 1)
    assert (config.hidden_size, config.moe_intermediate_size, config.n_routed_experts) == (2048, 1408, 64)
    assert (config.num_hidden_layers, config.vocab_size, config.first_k_dense_replace) == (1, 1024, 0)
    config = rehearsal_model.rehearsal_config("qwen3_14b", 2, 1024, None, 1)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (5120, 17408, 128)
    assert (config.num_attention_heads, config.num_key_value_heads, len(config.layer_types)) == (40, 8, 2)


def test_weights_have_published_names_and_depend_on_the_seed_alone(tmp_path: Path) -> None:
    files = []
    for folder, layers, seed in (("a", 1, 0), ("b", 2, 0), ("c", 1, 1)):
        config = rehearsal_model.rehearsal_config("deepseek_moe_16b", layers, 1024, 8, 8)
        rehearsal_model.write_model(tmp_path / folder, config, seed)
        files.append(load_file(tmp_path / folder / "model.safetensors"))
    name = "model.layers.{}.mlp.experts.7.down_proj.weight"
    assert name.format(0) in files[0] and name.format(0) not in files[1] and name.format(1) in files[1]
    query = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(files[0][query], files[1][query]) and not torch.equal(files[0][query], files[2][query])


def test_a_program_that_a_rank_is_about_to_start_is_no_rank() -> None:
    """Between its fork and its own program it has the arguments and the memory of the rank."""
    rank = "import os, time; child = os.fork(); child and print(os.getpid(), flush=True); time.sleep(600)"
    launch = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}, '--local_rank=0'])"
    with subprocess.Popen([sys.executable, "-c", launch], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        records = RankMemory(launcher.pid).ranks()
        for process in psutil.Process(launcher.pid).children(recursive=True):
            process.kill()
    assert records == [pid]
