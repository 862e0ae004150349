"""Runs whose channels are permuted first: what they start from, how they go on, and what is made of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.cli.main import main
from sparseforge_ds.export.permuted_folder import DenseFolder
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.model.permutation_record import Permutation
from sparseforge_ds.train.trainer import main as launch
from tests.distributed import run_distributed
from tests.end_to_end.test_train import differences, flags_of, states, train
from tests.sparse_folders import bits
from tests.tiny_folders import BYTE_VOCABULARY, deepspeed_json, write_model, write_text
from tests.tiny_models import BUILDERS
from tests.unit.permutation.test_channels import randomized

ONE_SHOT = {"method": "oneshot", "max_steps": 0, "importance": "magnitude"}


def dense_model(folder: Path, family: str) -> Path:
    write_text(folder / "text.jsonl", documents=200)
    more = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}
    return write_model(folder / "model", randomized(BUILDERS[family](vocab_size=BYTE_VOCABULARY, **more)))


def permuted(run: Path, dense: Path, out: Path) -> Path:
    """The dense model in the order of a run."""
    order = Permutation.load(run)
    assert order is not None
    out.mkdir()
    DenseFolder(dense).write(order, out)
    return out


def same(one: Path, two: Path) -> bool:
    a, b = TensorFolder(one), TensorFolder(two)
    return a.specs == b.specs and all(torch.equal(bits(a.read(name)), bits(b.read(name))) for name in a.specs)


@torch.no_grad()
def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(input_ids=torch.arange(3, 35).view(2, 16)).logits


@pytest.mark.parametrize(
    ("family", "stage", "permute"),
    [
        ("llama", 3, {}),
        ("gpt2", 1, {"score": "magnitude"}),
        ("qwen3_moe", 3, {}),
        ("qwen3_moe", 2, {"score": "magnitude", "dimensions": "mlp"}),
    ],
)
def test_one_shot(tmp_path: Path, family: str, stage: int, permute: dict[str, str]) -> None:
    """What is pruned is the permuted model, which computes what the dense one does."""
    dense, run, out = dense_model(tmp_path, family), tmp_path / "run", tmp_path / "out"
    content = deepspeed_json(stage, **ONE_SHOT, permute=permute)
    train(*flags_of(tmp_path, content))
    whole = permuted(run, dense, tmp_path / "whole")
    torch.testing.assert_close(logits(whole), logits(dense), rtol=1e-4, atol=2e-5)
    assert main(["consolidate", str(run), str(out), "--skip_proof"]) == 0
    assert main(["verify", str(out)]) == 0
    expected, exported = TensorFolder(whole), TensorFolder(out)
    rows = json.loads((out / "sparsity.json").read_text())["weights"]
    for name in exported.specs:
        value, of_dense = exported.read(name), expected.read(name)
        assert torch.equal(value, torch.where(value != 0, of_dense, 0.0)), name
        if name in rows:
            group_GM = NM(2, 4).to_groups(value.reshape(-1), tuple(value.shape), rows[name]["input_axis"])
            assert ((group_GM != 0).sum(1) == 2).all()
    order = Permutation.load(run)
    assert order is not None and order.which == permute.get("dimensions", "all")
    assert order.facts["score"] == permute.get("score", "activations")
    assert all(kept["after"] > kept["before"] for kept in order.facts["kept"].values())


def test_a_mask_carries_the_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, run = dense_model(tmp_path, "llama"), tmp_path / "run"
    content = deepspeed_json(2, **ONE_SHOT, permute={})
    train(*flags_of(tmp_path, content))
    hf, mask, again = tmp_path / "hf", tmp_path / "mask", tmp_path / "again"
    assert main(["consolidate", str(run), str(hf), "--skip_proof"]) == 0
    assert main(["export", str(run), str(mask), "--format", "mask"]) == 0
    assert "proved: masks equal to the source's" in capsys.readouterr().out
    assert main(["export", str(hf), str(again), "--format", "mask"]) == 0
    assert (again / "mask.safetensors").read_bytes() == (mask / "mask.safetensors").read_bytes()
    whole = permuted(run, dense, tmp_path / "whole")
    for name, model in (("of_dense", dense), ("of_permuted", whole)):
        assert main(["export", str(again), str(tmp_path / name), "--model", str(model), "--skip_proof"]) == 0
        assert same(tmp_path / name, hf)
        assert Permutation.load(tmp_path / name).sha256 == Permutation.load(run).sha256  # type: ignore[union-attr]

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main([*words]) == 2
        return capsys.readouterr().err

    assert main(["permute", str(dense), str(tmp_path / "other"), "--seed", "7"]) == 0
    assert "in the order of permutation" in refused(
        "export", str(mask), str(tmp_path / "x"), "--model", str(tmp_path / "other")
    )
    for folder, file in ((run, "sparseforge.json"), (hf, "sparsity.json"), (mask, "mask.json")):
        (folder / "permutation").rename(folder / "lost")
        words = ("export", str(folder), *(("--model", str(dense)) if folder == mask else ()))
        if folder == hf:
            assert main(["verify", str(hf)]) == 1
        assert f"{file}: was written with the channels in the order" in refused(*words, str(tmp_path / "x"))
    checkpoint = next((run / "checkpoints").glob("step_*")).rename(tmp_path / "alone")
    words = ("export", str(checkpoint), str(tmp_path / "x"), "--model", str(dense))
    assert "its mask fits no dense model" in refused(*words, "--format", "mask")


def test_training_goes_on_in_the_same_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bit for bit, and with the order that it was begun in."""
    dense_model(tmp_path, "llama")
    content = deepspeed_json(3, permute={"score": "magnitude"})
    flags = flags_of(tmp_path, content, keep_checkpoints=0)
    train(*flags)
    run, copy = tmp_path / "run", tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_000008")
    words = [*(flag for flag in flags if not flag.startswith("--output_dir")), f"--output_dir={copy}", "--resume"]
    train(*words)
    last = Path("checkpoints") / "step_000008"
    assert differences(states(run / last), states(copy / last)) == []
    assert Permutation.load(copy).sha256 == Permutation.load(run).sha256  # type: ignore[union-attr]
    shutil.rmtree(copy / last)
    train(*words, ranks=1)  # on other ranks
    assert main(["consolidate", str(run), str(tmp_path / "out")]) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    shutil.rmtree(copy / last)
    shutil.rmtree(copy / "permutation")
    assert run_distributed(launch, 2, words) == [1, 1]
    assert "has no permutation" in "".join(capfd.readouterr())
    write = {**content, "sparseforge": {**content["sparseforge"], "permute": None}}
    (tmp_path / "ds.json").write_text(json.dumps(write))
    assert run_distributed(launch, 2, words) == [1, 1]
    assert "sparseforge.permute was" in "".join(capfd.readouterr())


@pytest.mark.parametrize(("stage", "dimensions"), [(1, "all"), (3, "all"), (2, "mlp+heads")])
def test_hidden_states_are_compared_channel_by_channel(tmp_path: Path, stage: int, dimensions: str) -> None:
    """The teacher has the student's order; in its own it would be at a relative distance of about 2."""
    dense_model(tmp_path, "llama")
    permute = {"score": "magnitude", "dimensions": dimensions}
    distances = []
    for name, more in (("plain", {}), ("permuted", {"permute": permute})):
        content = deepspeed_json(stage, distillation={"hidden": {"weight": 4.0}}, **more)
        train(*flags_of(tmp_path, content, output_dir=tmp_path / name))
        distances.append(json.loads((tmp_path / name / "result.json").read_text())["last_step"]["loss/hidden"])
    assert 0 < distances[1] < 2 * distances[0] < 1.0


def test_a_folder_that_was_permuted_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dense = dense_model(tmp_path, "llama")
    assert main(["permute", str(dense), str(tmp_path / "offline")]) == 0
    content = deepspeed_json(2, **ONE_SHOT)
    train(*flags_of(tmp_path, content, model=tmp_path / "offline"))
    run, hf, mask = tmp_path / "run", tmp_path / "hf", tmp_path / "mask"
    assert Permutation.load(run).sha256 == Permutation.load(tmp_path / "offline").sha256  # type: ignore[union-attr]
    assert main(["consolidate", str(run), str(hf), "--skip_proof"]) == 0
    assert main(["export", str(run), str(mask), "--format", "mask"]) == 0
    assert main(["export", str(mask), str(tmp_path / "applied"), "--model", str(dense), "--skip_proof"]) == 0
    assert same(tmp_path / "applied", hf)
    content["sparseforge"]["permute"] = {}
    flags = flags_of(tmp_path, content, model=tmp_path / "offline", output_dir=tmp_path / "twice")
    assert run_distributed(launch, 1, flags) == [1]
    assert "is permuted already" in "".join(capfd.readouterr())
