"""Exports of real runs to every format, over the command line, each proved in fresh processes."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

import sparseforge_ds.extras.packed24  # noqa: F401  registers the format, as users do
from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate.finished_model import find_adapter, load_model
from sparseforge_ds.export.open import open_source
from sparseforge_ds.model.pretrained import find_model
from tests import tiny_models
from tests.distributed import run_distributed
from tests.sparse_folders import bits
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer, write_text
from tests.zero.case import Case, batch_at, build, probe_of, train_step

CASES: dict[str, tuple[Any, Case]] = {
    "llama-fp16": (tiny_models.tiny_llama, Case(stage=3, dtype="fp16", more={"fp16": {"loss_scale": 16}})),
    "qwen3-tied-padded": (tiny_models.tiny_qwen3, Case(stage=1, dtype="bf16")),
    "gpt2": (tiny_models.tiny_gpt2, Case(stage=2, dtype="bf16")),
    "llama-branch": (tiny_models.tiny_llama, Case(stage=3, config={"low_rank": {"k": 12}})),  # of 32 and 64 inputs
    "gpt2-branch": (tiny_models.tiny_gpt2, Case(stage=2, dtype="bf16", config={"low_rank": {"k": 8}})),
    "llama-learned": (tiny_models.tiny_llama, Case(stage=2, config={"low_rank": {"k": 8, "learned": True}})),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def save_runs(folder: str) -> dict[str, Tensor]:
    """Train every case and save it as the trainer does; the logits of the engines at the end."""
    logits = {}
    for name, (build_model, case) in CASES.items():
        run = Path(folder) / name
        model = build_model(**({"vocab_size": BYTE_VOCABULARY} if "padded" in name else {}))
        if torch.distributed.get_rank() == 0:
            model.to(DTYPES[case.dtype]).save_pretrained(run / "model")  # the dense model, as a run starts from it
            byte_tokenizer().save_pretrained(run / "model")
            (run / "sparseforge.json").write_text(json.dumps({"coverage": {"masked": 1}}))
            model = model.float()
        torch.distributed.barrier()
        model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
        engine, forge = build(case, model)
        forge.start(probe_of(engine, case, 0))
        for step in range(case.steps):
            train_step(engine, case, step)
            forge.step(probe_of(engine, case, step))
        engine.save_checkpoint(str(run / "checkpoints"), tag="step")
        engine.eval()
        with torch.no_grad():
            logits[name] = engine(batch_at(0)["input_ids"]).logits
    return logits


@dataclass(frozen=True)
class Run:
    folder: Path
    logits: Tensor

    @property
    def dense(self) -> Path:
        return self.folder / "model"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    results = run_distributed(save_runs, 2, str(folder))[0]
    return {name: Run(folder / name, logits) for name, logits in results.items()}


def export(run: Run, out: Path, *arguments: str) -> Path:
    assert main(["export", str(run.folder), str(out), *arguments]) == 0
    return out


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(batch_at(0)["input_ids"]).logits


@pytest.mark.parametrize("name", ["llama-fp16", "qwen3-tied-padded", "gpt2"])
def test_packed24_gives_the_weights_and_logits_of_the_run(
    runs: dict[str, Run], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = export(runs[name], tmp_path / "hf", "--skip_proof", "--max_shard_size", "20KB")
    proof = [] if name == "llama-fp16" else ["--skip_proof"]  # the model's logits below are the engine's in any case
    packed = export(runs[name], tmp_path / "packed", "--format", "packed24", "--max_shard_size", "20KB", *proof)
    stdout = capsys.readouterr().out
    assert "verified, packed into values and positions" in stdout
    assert proof or "proved: loaded by transformers with sparseforge_ds, logits bit-equal" in stdout
    expected, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in (hf, packed))
    model.dequantize()
    state = model.state_dict()
    assert all(torch.equal(bits(state[key]), bits(value)) for key, value in expected.state_dict().items())
    assert torch.equal(logits(model).float(), runs[name].logits.float())
    again = tmp_path / "again"
    assert main(["export", str(hf), str(again), "--format", "packed24", "--skip_proof"]) == 0
    first, second = TensorFolder(packed), TensorFolder(again)
    assert first.specs.keys() == second.specs.keys()
    assert all(torch.equal(bits(first.read(key)), bits(second.read(key))) for key in first.specs)
    assert (packed / "tokenizer.json").read_bytes() == (runs[name].dense / "tokenizer.json").read_bytes()


def test_hf_with_a_branch_is_proved_with_its_adapter(runs: dict[str, Run], tmp_path: Path) -> None:
    out = export(runs["llama-branch"], tmp_path / "out")
    proof = json.loads((out / "sparsity.json").read_text())["proof"]
    assert proof["logits"] == "bit-equal" and proof["loaded_by"] == "transformers"
    assert proof["adapter"]["difference"] <= 1e-5 < 1e-2 < proof["adapter"]["effect"]
    # our evaluations take it along, and do without it when told to
    measured = load_model(str(out), adapter=find_adapter(str(out), None))
    torch.testing.assert_close(logits(measured), runs["llama-branch"].logits, rtol=0, atol=1e-5)
    bare = load_model(str(out), adapter=find_adapter(str(out), "none"))
    assert (logits(bare) - logits(measured)).abs().max() > 1e-2
    by_peft = PeftModel.from_pretrained(bare, out).eval()
    torch.testing.assert_close(logits(by_peft), runs["llama-branch"].logits, rtol=0, atol=1e-5)
    assert find_adapter("gpt2", None) is None and find_adapter("gpt2", str(out)) == str(out)


@pytest.mark.parametrize("format", ["hf", "packed24"])
def test_from_pretrained_alone_loads_the_branch(
    runs: dict[str, Run], tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loaded the weights without the branch that they were trained with, and said nothing."""
    made = export(runs["llama-branch"], tmp_path / "made", "--format", format, "--skip_proof")
    moved = made.rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    expected = runs["llama-branch"].logits
    for folder, cwd in ((str(moved), tmp_path / "elsewhere"), ("moved", tmp_path), (".", moved)):
        monkeypatch.chdir(cwd)
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder)), expected, rtol=0, atol=1e-5)
    card = (moved / "README.md").read_text()
    assert ("import peft" in card, "import sparseforge_ds" in card) == (format == "hf", format == "packed24")
    assert (moved / "adapter_model.safetensors").exists() == (format == "hf")
    if format == "packed24":
        with pytest.raises(ValueError, match="is packed, with low-rank branches"):
            find_model(str(moved), "--model")
    assert main(["verify", str(moved)]) == 0
    again = tmp_path / "again"
    assert main(["export", str(moved), str(again), "--skip_proof"]) == 0
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(again)), expected, rtol=0, atol=1e-5)
    # as a dense model it would bring further layers
    with pytest.raises(ValueError, match="has a PEFT adapter beside its weights .* merge it into the weights"):
        find_model(str(again), "--model")


def test_a_branch_that_is_missing_is_said_by_every_tool_of_ours(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export(runs["llama-branch"], tmp_path / "out", "--skip_proof")
    assert "from_pretrained loads it where peft is installed, and without it" in capsys.readouterr().out
    # peft is missing, which loads the branch.
    text = ["--text", str(write_text(tmp_path / "text.jsonl"))]
    with monkeypatch.context() as without_peft:
        without_peft.setitem(sys.modules, "peft", None)
        assert main(["evaluate", str(out), *text]) == 2
        assert f"--adapter {out}: peft is missing, which loads it; in the checkout pip" in capsys.readouterr().err
    # One byte of the branch, or of its config, is another.
    content = (out / "adapter_model.safetensors").read_bytes()
    (out / "adapter_model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert main(["verify", str(out)]) == 1
    assert f"not the exported bytes: {out / 'adapter_model.safetensors'}" in capsys.readouterr().out
    (out / "adapter_model.safetensors").write_bytes(content)
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    assert main(["verify", str(out)]) == 1
    assert f"not the exported bytes: {out / 'adapter_config.json'}" in capsys.readouterr().out
    # The branch is gone: no tool takes the model for a complete one.
    (out / "adapter_model.safetensors").unlink()
    (out / "adapter_config.json").unlink()
    missing = f"{out}: its low-rank adapter is missing (adapter_config.json"
    assert main(["verify", str(out)]) == 1
    assert missing in capsys.readouterr().out
    for command in (
        lambda: main(["export", str(out), str(tmp_path / "again")]),
        lambda: main(["evaluate", str(out), *text]),
        lambda: main(["evaluate", str(out), "--tasks", "piqa"]),
    ):
        assert command() == 2
        assert missing in capsys.readouterr().err
    # Asked to leave it out, a tool does, and logits differ.
    assert (logits(load_model(str(out), adapter=find_adapter(str(out), "none"))) - runs["llama-branch"].logits).any()


@pytest.mark.parametrize("from_folder", [False, True])
def test_a_learned_projection_is_stored_in_both_formats(
    from_folder: bool, runs: dict[str, Run], tmp_path: Path
) -> None:
    run = runs["llama-learned"]
    source = export(run, tmp_path / "hf")
    record = json.loads((source / "sparsity.json").read_text())
    assert record["proof"]["adapter"]["difference"] <= 1e-5 < 1e-2 < record["proof"]["adapter"]["effect"]
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(source)), run.logits, rtol=0, atol=1e-5)
    packed = tmp_path / "packed"
    origin = source if from_folder else run.folder
    assert main(["export", str(origin), str(packed), "--format", "packed24"]) == 0
    torch.testing.assert_close(logits(load_model(str(packed))), run.logits, rtol=0, atol=1e-5)
    config = json.loads((packed / "config.json").read_text())["quantization_config"]
    assert config["low_rank_learned"] is True and set(config["low_rank"].values()) == {8}
    record = json.loads((packed / "sparsity.json").read_text())
    assert len(record["branches"]) == 2 * len(record["weights"]) and record["proof"]["logits"] == "bit-equal"
    assert main(["verify", str(packed)]) == 0
    # a config.json by which transformers would build other branches is told apart
    stored = json.loads((packed / "config.json").read_text())
    other = {**config, "low_rank": dict.fromkeys(config["low_rank"], 4)}
    (packed / "config.json").write_text(json.dumps({**stored, "quantization_config": other}))
    with pytest.raises(ValueError, match="low_rank of its quantization_config is not that of the branches"):
        open_source(packed)
    (packed / "config.json").write_text(json.dumps(stored))
    # one whose projections are gone, or of another kind than its config says, is no model
    record["config"]["low_rank"]["learned"] = False
    (packed / "sparsity.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="low_rank_b is of shape .*, and not "):
        open_source(packed)


def test_packed24_with_a_branch_is_the_run(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pack GPT-2, whose branches sit on Conv1D."""
    run = runs["gpt2-branch"]
    packed = export(run, tmp_path / "packed", "--format", "packed24")
    record = json.loads((packed / "sparsity.json").read_text())
    assert record["proof"]["logits"] == "bit-equal" and "adapter" not in record["proof"]
    model = load_model(str(packed), adapter=find_adapter(str(packed), None))
    assert torch.equal(logits(model), run.logits)
    # B alone is stored: 2:4 in 0.5625 of the bytes, and an eighth for k = 8
    tensors = TensorFolder(packed)
    sparse = [
        spec.nbytes for name, spec in tensors.specs.items() if name.removesuffix("_positions") in record["weights"]
    ]
    branches = [tensors.specs[name].nbytes for name in record["branches"]]
    dense = sum(2 * math.prod(entry["shape"]) for entry in record["weights"].values())
    assert (sum(sparse) + sum(branches)) / dense == 0.5625 + 0.125 and len(branches) == len(record["weights"])
    assert record["bytes"]["branches"] == sum(branches)
    told = "low-rank branches), {:.4f} of the dense model's".format(
        sum(spec.nbytes for spec in tensors.specs.values()) / record["bytes"]["dense"]
    )
    assert told in capsys.readouterr().out
    assert main(["verify", str(packed)]) == 0 and told in capsys.readouterr().out
    # it is a source too, and never saved or made dense without its branches
    again = tmp_path / "again"
    assert main(["export", str(packed), str(again), "--format", "packed24", "--skip_proof"]) == 0
    assert (again / "model.safetensors").read_bytes() == (packed / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="has low-rank branches"):
        model.dequantize()
    content = bytearray((again / "model.safetensors").read_bytes())
    header = int.from_bytes(content[:8], "little")
    name = next(iter(record["branches"]))
    content[8 + header + json.loads(content[8 : 8 + header])[name]["data_offsets"][0]] ^= 1
    (again / "model.safetensors").write_bytes(content)
    assert main(["verify", str(again)]) == 1
    assert f"not the exported bytes: {name}" in capsys.readouterr().out
