"""`sparseforge plan`: what it prints, and what it says to wrong input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, FalconConfig, Gemma4TextConfig, PhimoeConfig, Qwen3MoeConfig, ViTConfig

from sparseforge_ds.cli.main import main
from sparseforge_ds.extras.planner.machine import GPUS
from sparseforge_ds.model.pretrained import find_model
from tests.conftest import ROOT
from tests.tiny_folders import deepspeed_json, write_json
from tests.tiny_models import tiny_dense, tiny_mixture
from tests.unit.extras.planner.hub_configs import qwen3_14b

EXPERTS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
ZERO3 = str(ROOT / "ds_configs" / "zero3.json")


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    qwen3_14b(num_hidden_layers=4).save_pretrained(tmp_path)
    return str(tmp_path / "config.json")


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    plan(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def test_the_demo_fits_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--model", "stdlib_llama", "--gpus", "2", "--deepspeed", ZERO3) == 0
    text = capsys.readouterr().out
    for part in ("zero3.json, 2 GPUs", "ZeRO-3, bfloat16", "100.0% of the linear weights", "+ mask update", "fits,"):
        assert part in text


def test_what_does_not_fit_gets_a_ladder(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", qwen, "--gpus", "2", "--gpu_memory", "40", "--deepspeed", ZERO3)
    assert plan(*arguments) == 1
    text = capsys.readouterr().out
    assert "does not fit: " in text
    assert re.search(r"\+ offload_optimizer to the CPU +[0-9.]+  fits$", text, re.MULTILINE)
    (result,) = plan_json(capsys, *arguments)
    assert not result["fits"]
    changes, peaks = zip(*result["ladder"], strict=True)
    assert changes == ("--activation_checkpointing", "--micro_batch 1", "offload_optimizer to the CPU")
    assert result["memory"]["peak"] > peaks[0] > peaks[1] > 40 * 2**30 >= peaks[2]
    values = ("--activation_checkpointing", "--micro_batch", "1", "--global_batch", "8")
    (less,) = plan_json(capsys, *arguments, *values)
    assert less["memory"]["peak"] == peaks[1]
    (tiny,) = plan_json(capsys, *arguments, "--gpu_memory", "5")
    assert tiny["ladder"][-1][0] == "offload_param to the CPU" and tiny["ladder"][-1][1] > 5 * 2**30
    assert result["memory"]["peak"] == (
        sum(result["memory"]["resident"].values())
        + sum(result["memory"]["phases"][result["memory"]["worst"]].values())
        + result["memory"]["reserve"]
    )


def test_one_gpu_takes_the_stage_that_an_offload_needs(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dividing among one helps nothing, so no rung is ZeRO-3 alone; then host memory is the only help."""
    arguments = ("--model", qwen, "--gpus", "1", "--seq_length", "512", "--deepspeed")
    offloads = ["offload_optimizer to the CPU", "offload_param to the CPU"]
    for stage, expected in (
        (0, [f"ZeRO stage 1 and {offloads[0]}", f"ZeRO stage 3 and {offloads[1]}"]),
        (2, [offloads[0], f"ZeRO stage 3 and {offloads[1]}"]),
        (3, offloads),
    ):
        path = write_json(tmp_path / "ds.json", {**deepspeed_json(stage, batch=1), "bf16": {"enabled": True}})
        assert plan(*arguments, str(path), "--gpu_memory", "20") == 1
        text = capsys.readouterr().out
        changes = re.findall(r"\+ ((?:ZeRO|offload).*?) +[0-9.]+(?:  fits)?\n", text)
        assert changes == expected and text.count("  fits\n") == 1 and "take more GPUs" not in text, (stage, text)


def test_a_small_model_is_told_in_mebibytes(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--gpus", "1", "--seq_length", "128", "--deepspeed", "zero1", "--max_steps", "60", "--model")
    for model, unit, size in (("stdlib_llama", "MiB", 2**20), (qwen, "GiB", 2**30)):
        (result,) = plan_json(capsys, *arguments, model)
        plan(*arguments, model)
        text = capsys.readouterr().out
        assert re.search(rf"memory of a GPU +{unit}\n", text) and f" {unit} on disk, " in text
        for line, planned_bytes in (("peak", result["memory"]["peak"]), ("checkpoint", result["checkpoint"])):
            assert re.search(rf"  {line} +{planned_bytes / size:.2f}  ", text), (line, text)


def test_json_says_what_fits_and_what_is_masked(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("--model", qwen, "--gpus", "8", "--seq_length", "1024", "--activation_checkpointing")
    (first,) = plan_json(capsys, *shared, "--deepspeed", ZERO3)
    assert first["fits"] and first["ladder"] == []
    assert first["settings"]["micro_batch"] == 1
    assert first["model"]["masked"] == first["model"]["linear"]


def test_json_is_all_that_is_printed() -> None:
    """DeepSpeed says on import, and on stdout, that it found no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, "-m", "sparseforge_ds", "plan", "--model", "stdlib_llama", "--gpus", "2", "--json"]
    process = subprocess.run(
        [*command, "--deepspeed", ZERO3], capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(process.stdout)[0]["fits"]


def test_batch_and_budget_give_accumulation_steps_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "stdlib_llama", "--gpus", "4", "--deepspeed", ZERO3, "--seq_length", "128")
    (result,) = plan_json(
        capsys, *arguments, "--global_batch", "32", "--micro_batch", "2", "--tokens", "1.25M", "--mfu", "0.5"
    )
    assert (result["settings"]["micro_batch"], result["settings"]["accumulation"]) == (2, 4)
    took = result["time"]
    assert took["steps"] == -(-1_250_000 // (32 * 128))
    attention = 2 * 128 * 64 * 5  # 5 layers that are 64 wide
    model_config = find_model("stdlib_llama", "--model").config
    assert model_config.tie_word_embeddings, "all weights multiply"
    head = 2 * model_config.vocab_size * 64
    body = 2 * result["model"]["active"] + attention - head
    # Of the student, twice as many backward, and the teacher's forward; logits of both are computed twice.
    operations = 32 * 128 * (4 * body + 6 * head)
    assert took["seconds_per_step"] == pytest.approx(operations / (4 * 989e12 * 0.5))
    (again,) = plan_json(capsys, *arguments, "--activation_checkpointing", "--tokens", "1.25M", "--mfu", "0.5")
    operations = 8 * 128 * (5 * body + 6 * head)
    assert again["time"]["seconds_per_step"] == pytest.approx(operations / (4 * 989e12 * 0.5))


def test_tokens_are_the_steps_of_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "stdlib_llama", "--gpus", "2", "--deepspeed", ZERO3, "--seq_length", "128")
    assert plan(*arguments, "--tokens", "1M") == 0
    text = capsys.readouterr().out
    assert re.search(r"schedule .*frozen \d+-977\n", text) and "977 steps of 1,024 tokens" in text
    assert plan(*arguments, "--tokens", "1M", "--max_steps", "400") == 2
    assert "--tokens 1000000 and --max_steps 400 both set the length" in capsys.readouterr().err


def test_a_gpu_has_the_peak_of_the_dtype_and_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("--model", "stdlib_llama", "--gpus", "2", "--seq_length", "128", "--deepspeed")
    single = str(write_json(tmp_path / "ds.json", deepspeed_json()))
    for gpu, path, dtype, peak, memory in (
        ("h100", ZERO3, "bfloat16", 989, 80),
        ("H200", single, "float32", 67, 141),
        ("v100", ZERO3, "float32", 15.7, 32),  # which has no bf16
        ("300", single, "float32", 300, 80),
    ):
        plan(*shared, path, "--gpu", gpu)
        text = capsys.readouterr().out
        assert f"ZeRO-3, {dtype}\n" in text and f"at 40% of {peak:g} TFLOPS" in text, gpu
        assert f" of {memory} GiB to spare" in text, gpu
    assert plan(*shared, ZERO3, "--gpu", "v100", "--gpu_memory", "16") == 0
    assert " of 16 GiB to spare" in capsys.readouterr().out


def test_the_help_has_the_memory_of_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan("--help")
    output = " ".join(capsys.readouterr().out.split())
    for name, gpu in GPUS.items():
        assert f"{name} ({gpu.memory:g}" in output


def test_several_configurations_are_planned_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        str(ROOT / "ds_configs" / name) for name in ("zero1.json", "zero2.json", "zero3.json", "zero3_offload.json")
    ]
    assert plan("--model", "stdlib_llama", "--gpus", "2", "--deepspeed", *files) == 0
    text = capsys.readouterr().out
    assert text.count("verdict") == 4
    assert text.strip().splitlines()[-1] == f"{', '.join(files)} fit"


def test_a_model_may_lie_where_temporary_files_do(qwen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan without a folder of a run, which is neither asked for nor refused."""
    monkeypatch.setattr("tempfile.tempdir", str(Path(qwen).parent))
    assert plan("--model", str(Path(qwen).parent), "--gpus", "8", "--deepspeed", ZERO3) == 0


def test_another_teacher_takes_memory_of_its_size(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    qwen3_14b(num_hidden_layers=8).save_pretrained(tmp_path / "teacher")
    shared = ("--model", qwen, "--gpus", "8", "--seq_length", "512", "--deepspeed", ZERO3)
    (same,) = plan_json(capsys, *shared)
    (other,) = plan_json(capsys, *shared, "--teacher", str(tmp_path / "teacher"))
    more = other["memory"]["resident"]["teacher"] - same["memory"]["resident"]["teacher"]
    assert more == pytest.approx(2 * 4 * (same["model"]["masked"] / 4) / 8, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nobody/no-such-model"], "check the name and the network"),
        (["--model", "./missing"], "no such folder or file"),
        (["--deepspeed", "missing.json"], "no such file"),
        (["--gpus", "3"], "train_batch_size = 8 cannot be divided"),
        (["--seq_length", "100000"], "has 512 positions; use at most 512"),
        (["--gpu", "abacus"], "known are a100, h100"),
        (["--gpus", "0"], "--gpus 0 is not valid: use an integer >= 1"),
        (["--mfu", "1.5"], "--mfu 1.5 is not valid: use a share"),
        (["--reserve", "80"], "--reserve 80.0 is not valid: use less than --gpu_memory 80"),
        (["--teacher", "{qwen}"], "vocabulary has 151936 entries"),
        (["--model", "{vit}"], "a vit model is no causal language model"),
        (["--teacher", "{vit}"], "a vit model is no causal language model"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    qwen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ViTConfig().save_pretrained(tmp_path / "vit")
    values = [argument.format(qwen=qwen, vit=tmp_path / "vit") for argument in arguments]
    assert plan("--model", "stdlib_llama", "--gpus", "2", "--deepspeed", ZERO3, *values) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    *notes, error = captured.err.splitlines()  # some cases give a flag twice
    assert error.startswith("error: ") and all(note.startswith("note: ") for note in notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam communicates compressed moments"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4 is not valid"),
        ({"zero_optimization": {"stage": 0}, "fp16": {"enabled": "auto"}}, "fp16 at ZeRO stage 0"),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'?"),
        ({"sparseforge": {"max_steps": 1}}, "use at least 2 steps"),
    ],
)
def test_what_a_run_refuses_is_not_planned(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_json(tmp_path / "ds.json", {**deepspeed_json(), **changes})
    v100 = ("--gpu", "v100")  # which computes in fp16, where that is left open
    assert plan("--model", "stdlib_llama", "--gpus", "2", *v100, "--deepspeed", str(path)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--tokens", "many"), ("--tokens", "0"), ("--gpus", "1.5")),
        *(("--gpu_memory", value) for value in ("nan", "much", "0", "1e308")),
    ],
)
def test_values_that_are_no_numbers(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        plan("--model", "stdlib_llama", "--gpus", "2", "--deepspeed", ZERO3, flag, value)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {flag}" in error and value in error and "_" not in error.replace(flag, "")


def test_probes_at_outputs_of_experts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_mixture(Qwen3MoeConfig).config.save_pretrained(tmp_path)
    path = write_json(tmp_path / "ds.json", deepspeed_json(importance="hutchinson"))
    assert plan("--model", str(tmp_path), "--gpus", "2", "--deepspeed", str(path)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert 'importance "hutchinson" displaces outputs' in captured.err
    assert "mlp.experts.gate_up_proj (2 in all) has no such layer" in captured.err


def test_a_proposed_block_is_pasted_and_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan a mixture that is mostly experts, and report their share where they stay dense."""
    PhimoeConfig(**EXPERTS).save_pretrained(tmp_path)
    arguments = ("--model", str(tmp_path), "--gpus", "2", "--seq_length", "32", "--deepspeed")
    assert plan(*arguments, str(write_json(tmp_path / "ds.json", deepspeed_json()))) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    block = json.loads("{" + error[error.index('"include": ') :] + "}")
    assert plan(*arguments, str(write_json(tmp_path / "ds.json", deepspeed_json(**block)))) == 0
    assert re.search(r"pruned +2:4 in 12 weights: 99\.5% of the linear weights", capsys.readouterr().out)
    without = str(write_json(tmp_path / "ds.json", deepspeed_json(**block, exclude=["*.experts.*"])))
    assert plan(*arguments, without) == 0
    text = capsys.readouterr().out
    assert re.search(r"pruned +2:4 in 8 weights: 11\.0% of the linear weights between .* of all parameters", text)
    assert re.search(r"left dense +model\.layers\.\*\.mlp\.experts\.gate_up_proj \(32,768 elements, 58\.9% of", text)
    (result,) = plan_json(capsys, *arguments, without)
    assert result["model"]["masked"] / result["model"]["linear"] < 0.12


def test_a_family_with_attention_classes_of_its_own_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_dense(FalconConfig).config.save_pretrained(tmp_path)
    block = str(write_json(tmp_path / "ds.json", deepspeed_json()))
    assert plan("--model", str(tmp_path), "--gpus", "2", "--seq_length", "32", "--deepspeed", block) == 0
    assert "2:4 in 8 weights: 100.0% of the linear weights" in capsys.readouterr().out


def test_any_family_prints_what_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
    arguments = ("--model", str(tmp_path), "--gpus", "2", "--seq_length", "32", "--deepspeed")
    assert plan(*arguments, str(write_json(tmp_path / "ds.json", deepspeed_json())), "--any_family") == 0
    text = capsys.readouterr().out
    assert "2:4 in 8 weights: 100.0% of the linear weights" in text
    (line,) = (line for line in text.splitlines() if line.strip().startswith("any_family"))
    block = json.loads("{" + line.strip().removeprefix("any_family") + "}")
    pasted = str(write_json(tmp_path / "ds.json", deepspeed_json(**block)))
    assert plan(*arguments, pasted) == 0
    assert "2:4 in 8 weights: 100.0% of the linear weights" in capsys.readouterr().out


def test_a_family_with_sizes_of_each_layer_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 4, a mixture whose config has one head size for sliding and another for full attention."""
    sizes = {**EXPERTS, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "enable_moe_block": True}
    per_layer = {"global_head_dim": 16, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    del sizes["num_local_experts"], sizes["num_experts_per_tok"]
    Gemma4TextConfig(**sizes, **per_layer).save_pretrained(tmp_path)
    arguments = ("--model", str(tmp_path), "--gpus", "2", "--seq_length", "32", "--any_family", "--deepspeed")
    assert plan(*arguments, str(write_json(tmp_path / "ds.json", deepspeed_json()))) == 0
    assert re.search(r"pruned +2:4 in \d+ weights: \d\d\.\d% of the linear weights", capsys.readouterr().out)


def test_a_family_without_rows_needs_allow_dense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--allow_dense` of the planner is the launcher's."""
    BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
    arguments = ("--model", str(tmp_path), "--gpus", "2", "--deepspeed", ZERO3)
    assert plan(*arguments) == 2
    assert "not covered: the family table has no rows for 'bloom'" in capsys.readouterr().err
    assert plan(*arguments, "--allow_dense", "*.mlp.*", "*.nothing") == 2
    assert "; allow_dense *.nothing: not needed, it matches no weight that is undecided" in capsys.readouterr().err
    assert plan(*arguments, "--allow_dense", "*.mlp.*", "--allow_dense", "*.self_attention.*") == 2
    assert "no weight of this bloom model is left to prune" in capsys.readouterr().err


def test_gpus_that_share_sequences_divide_the_activations(qwen: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", qwen, "--gpus", "8", "--deepspeed", ZERO3, "--seq_length", "8192", "--global_batch", "8")
    (full,) = plan_json(capsys, *arguments)
    (shared,) = plan_json(capsys, *arguments, "--sequence_parallel", "4")
    assert shared["settings"]["sequence_parallel"] == 4 and shared["settings"]["micro_batch"] == 4
    assert full["settings"]["micro_batch"] == 1
    (parts,) = plan_json(capsys, *arguments, "--sequence_parallel", "4", "--micro_batch", "1")
    of_pass = [item["memory"]["phases"]["forward and backward"]["activations"] for item in (full, parts)]
    assert of_pass[1] < 0.4 * of_pass[0]
    assert parts["memory"]["resident"] == full["memory"]["resident"]
    # A start takes fewer passes, because it needs a sequence for each of two groups, not of eight ranks.
    assert parts["time"].pop("start_seconds") < full["time"].pop("start_seconds")
    assert parts["time"] == full["time"]
    plan(*arguments, "--sequence_parallel", "4", "--micro_batch", "1")
    text = capsys.readouterr().out
    assert "1 a group x 4 accumulated x 2 groups of 4 ranks that share sequences" in text
    assert "on 4 GPUs, 2,048 of 8,192 tokens and 1/4 of the heads a GPU" in text
    assert plan(*arguments, "--sequence_parallel", "3") == 2
    assert "--sequence_parallel 3: 8 ranks cannot be divided into groups of 3" in capsys.readouterr().err
    assert plan(*arguments[:3], "21", *arguments[4:8], "--sequence_parallel", "7", "--global_batch", "3") == 2
    assert "--seq_length 8192 is not a multiple of 7; use 8190 or 8197" in capsys.readouterr().err
