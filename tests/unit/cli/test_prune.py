"""`sparseforge prune`: an ordinary 2:4 folder, from files of any family; and from where it was stopped."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, JetMoeConfig, JetMoeForCausalLM

from sparseforge_ds.cli.main import main
from sparseforge_ds.export import formats
from sparseforge_ds.export.verification import check_folder
from sparseforge_ds.prune import block_by_block
from tests.tiny_folders import BYTE_VOCABULARY, write_model, write_text
from tests.tiny_models import BUILDERS, tiny_gpt2, tiny_llama

_QUICK = ("--tokens", "512", "--seq_length", "32", "--epochs", "1", "--device", "cpu")
FAMILIES = (
    *("deepseek_v3", "gemma2", "gpt2", "gpt_neox", "gpt_oss", "llama", "llama4_text", "mixtral", "qwen3", "qwen3_moe"),
)
"""One for each way to name tensors in files, to store experts, and to call blocks."""


def _model(family: str, **overrides: Any) -> Any:
    return BUILDERS[family](vocab_size=BYTE_VOCABULARY, bos_token_id=256, eos_token_id=257, **overrides)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.jsonl")


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_every_family_are_pruned_in_their_blocks_alone(
    family: str, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "dense", _model(family).bfloat16())
    out = tmp_path / "out"
    (folder / "LICENSE").write_text("free")
    assert main(["prune", str(folder), str(out), "--text", str(text), *_QUICK]) == 0
    assert "verified" in capsys.readouterr().out
    report = check_folder(out)
    assert report.ok and sum(row.violations for row in report.rows) == 0
    record = json.loads((out / "sparsity.json").read_text())
    assert record["finished"] and record["dtype"] == "bfloat16" and len(record["source"]["errors"]) == 2
    card = (out / "README.md").read_text()
    for row in ("method | sparseforge prune, block by block", "tokens | 512", "text | `text.jsonl`"):
        assert f"| {row} |" in card, row
    assert (
        "| first masks |" in card
        and "| share of steps with soft masks | 0.4 |" in card
        and "oneshot" not in card
        and "importance" not in card
    )
    assert (out / "tokenizer.json").is_file() and (out / "LICENSE").is_file()
    dense = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    pruned = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert dense.keys() == pruned.keys()
    for name in dense:
        same = torch.equal(dense[name], pruned[name])
        assert same or ("layers." in name or ".h." in name) and "router" not in name and "mlp.gate." not in name, name
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("dense", "out", "text.jsonl")] == []


def test_what_was_stopped_goes_on_to_the_same_bytes(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "dense", _model("llama", num_hidden_layers=3).bfloat16())
    words = ["prune", str(folder), "--text", str(text), *_QUICK]
    assert main([*words[:2], str(tmp_path / "whole"), *words[2:]]) == 0
    solve_block = block_by_block.solve_block
    solved: list[str] = []

    def stop_at_the_second(module: Any, *inputs: Any) -> Any:
        if solved:
            raise KeyboardInterrupt
        solved.append(f"block {module.self_attn.layer_idx}")
        return solve_block(module, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(block_by_block, "solve_block", stop_at_the_second)
        assert main([*words[:2], str(tmp_path / "out"), *words[2:]]) == 130
    assert not (tmp_path / "out").exists() and (tmp_path / "out.part").is_dir()
    assert "out.part: 1 of 3 blocks are done; the same command goes on from there" in capsys.readouterr().out
    # Two at a time would overwrite each other's streams; and another run does not take over what it finds. A plan says
    # the same, and changes nothing.
    again = [*words[:2], str(tmp_path / "out"), *words[2:]]

    def is_refused(message: str, *flags: str) -> None:
        files = {path: path.read_bytes() for path in (tmp_path / "out.part").iterdir()}
        assert main([*again, *flags, "--dry_run"]) == 2 and message in capsys.readouterr().err
        assert files == {path: path.read_bytes() for path in (tmp_path / "out.part").iterdir()}
        assert main([*again, *flags]) == 2 and message in capsys.readouterr().err

    with (tmp_path / "out.part" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_refused("another process is at work")
    is_refused("begun with other settings (prune.start.rate was", "--rate", "0.5")
    weights = folder / "model.safetensors"
    dense = weights.read_bytes()
    weights.write_bytes(dense[:-2] + b"\0\0")  # another model with files as large
    is_refused("begun with other settings (prune.model was")
    weights.write_bytes(dense)
    block_file = tmp_path / "out.part" / "block_00000.safetensors"
    content = block_file.read_bytes()
    block_file.write_bytes(content[: len(content) // 2])
    is_refused("block_00000.safetensors: is damaged")
    block_file.write_bytes(content[:-2] + bytes([content[-2], content[-1] ^ 0x80]))  # the sign of a weight
    assert main([*words[:2], str(tmp_path / "out"), *words[2:]]) == 2
    assert "is damaged (other bytes of model.layers.0" in capsys.readouterr().err
    block_file.write_bytes(content)
    assert main([*again, "--dry_run"]) == 0
    assert " minutes for 2 of 3 blocks: forward passes" in capsys.readouterr().out

    def note(module: Any, *inputs: Any) -> Any:
        solved.append(f"block {module.self_attn.layer_idx}")
        return solve_block(module, *inputs)

    with monkeypatch.context() as patch:
        patch.setattr(block_by_block, "solve_block", note)
        assert main([*words[:2], str(tmp_path / "out"), *words[2:]]) == 0
    record = json.loads((tmp_path / "out" / "sparsity.json").read_text())
    assert record["source"]["errors"][0].keys() == {"error_before", "error", "few_tokens"}
    assert solved == ["block 0", "block 1", "block 2"] and not (tmp_path / "out.part").exists()
    for name in ("model.safetensors", "sparsity.json", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_folder_of_the_user_with_the_name_of_unfinished_results_stays(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "dense")
    part = tmp_path / "out.part"
    part.mkdir()
    (part / "notes.tmp").write_text("mine")
    assert main(["prune", str(folder), str(tmp_path / "out"), "--text", str(text), *_QUICK]) == 2
    assert "out.part: has files that no prune has written (notes.tmp)" in capsys.readouterr().err
    assert [path.name for path in part.iterdir()] == ["notes.tmp"]


def test_a_link_in_the_place_of_unfinished_results_is_refused(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "dense")
    part = tmp_path / "out.part"
    words = ["prune", str(folder), str(tmp_path / "out"), "--text", str(text), *_QUICK]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    part.symlink_to(elsewhere)
    assert main(words) == 2
    assert "out.part: is a link or a file, and unfinished blocks go there" in capsys.readouterr().err
    part.unlink()
    part.write_text("mine")
    assert main(words) == 2
    part.unlink()
    # A lock that is a link must not empty its target.
    precious = tmp_path / "precious"
    precious.write_text("mine")
    part.mkdir()
    (part / "lock").symlink_to(precious)
    assert main(words) == 2
    assert "lock: is a link" in capsys.readouterr().err and precious.read_text() == "mine"
    assert not list(elsewhere.iterdir()) and not (tmp_path / "out").exists()


def test_blocks_that_are_done_are_kept_where_the_export_fails(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["prune", str(write_model(tmp_path / "dense")), str(tmp_path / "out"), "--text", str(text), *_QUICK]

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(formats, "write_model", fail)
        assert main(words) == 2
    captured = capsys.readouterr()
    assert "out.part: 2 of 2 blocks are done; the same command goes on from there" in captured.out
    assert "No space left on device" in captured.err and not (tmp_path / "out").exists()
    monkeypatch.setattr(block_by_block, "solve_block", fail)  # none is solved again
    assert main(words) == 0
    assert not (tmp_path / "out.part").exists()


def test_a_disk_without_room_for_the_result_is_named_before_any_work(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["prune", str(write_model(tmp_path / "dense")), str(tmp_path / "out"), "--text", str(text), *_QUICK]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=20_000))
    assert main(words) == 2
    message = "out.part: its disk has 0.0 GB free, and the finished model and its unfinished blocks will take 0.0 GB; m"
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert main([*words, "--dry_run"]) == 1
    assert "of files do not fit onto the disk, which has 0.00: make room" in capsys.readouterr().out


def test_blocks_that_are_done_need_no_more_room(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = write_model(tmp_path / "dense")
    words = ["prune", str(dense), str(tmp_path / "out"), "--text", str(text), *_QUICK]

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(formats, "write_model", fail)
        assert main(words) == 2
    room = int(1.1 * (dense / "model.safetensors").stat().st_size)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=room))
    assert main([*words, "--dry_run"]) == 0
    assert main(words) == 0
    # Without them there would be too little.
    other = [*words[:2], str(tmp_path / "other"), *words[3:]]
    assert main([*other, "--dry_run"]) == 1 and main(other) == 2
    capsys.readouterr()


def test_streams_on_the_disk_give_the_same(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "dense")
    for name, share in (("memory", 0.4), ("disk", 0.0)):
        monkeypatch.setattr("sparseforge_ds.prune.hidden_streams.SHARE", share)
        assert main(["prune", str(folder), str(tmp_path / name), "--text", str(text), *_QUICK]) == 0
    memory, disk = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("memory", "disk"))
    assert memory == disk


def test_files_without_the_prefix_of_the_model_are_pruned(tmp_path: Path, text: Path) -> None:
    """GPT-2 was published so; and beside the weights there are buffers that nobody loads."""
    folder = write_model(tmp_path / "dense", _model("gpt2"))
    out = tmp_path / "out"
    tensors = {
        name.removeprefix("transformer."): value for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors | {"h.0.attn.masked_bias": torch.tensor(-1e4)}, folder / "model.safetensors", {"format": "pt"})
    assert main(["prune", str(folder), str(out), "--text", str(text), "--pattern", "1:4", *_QUICK]) == 0
    written = load_file(out / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert (written["h.1.mlp.c_fc.weight"].t().reshape(-1, 4) != 0).sum(1).max() == 1
    assert isinstance(AutoModelForCausalLM.from_pretrained(out), type(tiny_gpt2()))


def test_a_basis_and_an_order_of_channels_stay_with_the_model(tmp_path: Path, text: Path) -> None:
    """Prune a folder that was permuted or rotated before."""
    folder = write_model(tmp_path / "dense")
    assert main(["permute", str(folder), str(tmp_path / "permuted")]) == 0
    small = ["--text", str(text), "--sequences", "2", "--seq_length", "32"]
    assert main(["rotate", str(folder), str(tmp_path / "rotated"), "--steps", "2", *small]) == 0
    for name, kept in (("permuted", "permutation.json"), ("rotated", "rotation.json")):
        out = tmp_path / f"{name}_pruned"
        assert main(["prune", str(tmp_path / name), str(out), "--text", str(text), *_QUICK]) == 0
        assert (out / kept).exists() and check_folder(out).ok


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "mask"), [("llama", "sparsegpt"), ("gpt2", "wanda"), ("mixtral", "magnitude")])
def test_a_gpu_prunes_to_the_pattern(family: str, mask: str, tmp_path: Path, text: Path) -> None:
    folder = write_model(tmp_path / "dense", _model(family).bfloat16())
    out = tmp_path / "out"
    words = ["prune", str(folder), str(out), "--text", str(text), "--mask", mask, *_QUICK[:-1], "cuda"]
    assert main(words) == 0
    assert check_folder(out).ok


def test_what_cannot_be_pruned_is_refused_before_a_folder_is_written(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "dense")
    out = tmp_path / "out"

    def error(*words: str, model: Path = folder) -> str:
        assert main(["prune", str(model), str(out), "--text", str(text), *_QUICK, *words]) == 2
        assert not out.exists()
        return capsys.readouterr().err

    # Settings that do not fit this model or text.
    assert "--tokens 0: use an integer >= 1" in error("--tokens", "0")
    assert "less than one sequence of 32" in error("--tokens", "31")
    assert "--seq_length 65: the model has 64 positions" in error("--seq_length", "65")
    assert "error: --soft 2.0 is not valid: use a fraction from 0 to 1" in error("--soft", "2")
    for rate in ("0", "inf", "nan"):
        assert "error: --rate " in error("--rate", rate)
    assert "error: --batch 0 is not valid: leave it out, or use an integer >= 1" in error("--batch", "0")
    assert "error: --seed -1 is not valid" in error("--seed", "-1")
    assert "error: --exclude: 'none' matches no weight" in error("--exclude", "none")
    for name in ("sparseforge.model", "sparseforge.seed", "sparseforge.json"):  # a path, and no key
        assert f"/{name}: " in error(model=tmp_path / name)
    assert "--rate 0.5: --epochs 0 trains nothing; leave one of the two out" in error("--epochs", "0", "--rate", "0.5")
    assert "--seed 5: --epochs 0 trains nothing; leave one of the two out" in error("--epochs", "0", "--seed", "5")
    assert "unknown pattern" in error("--pattern", "2of4")
    assert '"sparsegpt" (--mask of prune) needs an n:m pattern' in error("--pattern", "block16", "--mask", "sparsegpt")
    assert "--device tpu9" in error("--device", "tpu9")
    assert "--device meta: use cpu, or cuda with a GPU" in error("--device", "meta")
    assert "no such folder" in error(model=tmp_path / "nothing")
    # Weights that cannot be pruned: of another dtype, or not finite.
    name = "model.layers.1.mlp.down_proj.weight"
    file = tmp_path / "odd" / "model.safetensors"
    odd = write_model(tmp_path / "odd")
    full = load_file(file)
    save_file(full | {name: full[name].to(torch.int16)}, file, {"format": "pt"})
    assert f"{odd}: {name} is stored as torch.int16, which transformers would cast" in error(model=odd)
    for infinite in ("lm_head.weight", name):
        save_file(full | {infinite: full[infinite] * float("inf")}, file, {"format": "pt"})
        assert f"{odd}: {infinite} is not finite; give a sound model" in error(model=odd)
        assert not (tmp_path / "out.part").exists(), "no block was pruned"
    # Files that lack a tensor, also one that no block has, or have one in another shape.
    for missing in (name, "lm_head.weight", "model.norm.weight"):
        save_file({other: full[other] for other in full if other != missing}, file, {"format": "pt"})
        assert f"{odd}: holds no {missing}, which the model of its config.json needs" in error(model=odd)
    save_file({}, file, {"format": "pt"})
    assert f"{odd}: holds no model.embed_tokens.weight, which" in error(model=odd)
    rows, columns = full[name].shape
    for shape in ((rows, columns - 4), (rows, columns + 4), (columns, rows)):
        save_file(full | {name: torch.zeros(shape)}, file, {"format": "pt"})
        expected = f"{name} has the shape {shape} in the files, and by config.json {(rows, columns)}; put back"
        assert f"error: {odd}: {expected}" in error(model=odd)
    assert not (tmp_path / "out.part").exists()
    # A tokenizer that has more tokens than the model.
    few = write_model(tmp_path / "few", tiny_llama(vocab_size=60))
    assert f"error: {few}: its tokenizer gives token 256, the model has 60 embeddings" in error(model=few)
    # A mask that needs the inputs of single layers.
    mixture = write_model(tmp_path / "mixture", _model("mixtral"))
    assert 'is of fused experts; use "wanda"' in error("--mask", "sparsegpt", model=mixture)
    assert not (tmp_path / "out.part").exists()
    # A folder that is there already, and a model that is sparse.
    assert main(["prune", str(folder), str(out), "--text", str(text), *_QUICK, "--epochs", "0"]) == 0
    assert main(["prune", str(folder), str(out), "--text", str(text), *_QUICK]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert main(["prune", str(out), str(tmp_path / "again"), "--text", str(text), *_QUICK]) == 2
    assert "is sparse already" in capsys.readouterr().err


def test_a_family_of_which_little_is_pruned_is_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 1, "kv_channels": 8}
    config = JetMoeConfig(vocab_size=BYTE_VOCABULARY, **sizes, intermediate_size=64, num_local_experts=4)
    model = write_model(tmp_path / "jetmoe", JetMoeForCausalLM(config))
    words = [
        "prune",
        str(model),
        str(tmp_path / "out"),
        "--text",
        "stdlib:train",
        "--any_family",
        "--mask",
        "magnitude",
    ]
    assert main([*words, "--epochs", "0", "--tokens", "256", "--seq_length", "32"]) == 0
    warning = r"warning: only \d\.\d% of the linear weights will be pruned: .*register"
    assert re.search(warning, capsys.readouterr().out)
    words = ["evaluate", str(model), "--text", "stdlib:heldout", "--limit", "1", "--max_tokens", "64"]
    assert main([*words, "--seq_length", "32", "--one_shot", "2:4", "--any_family"]) == 0
    assert re.search(warning, capsys.readouterr().out)
