"""A dry run says what the run will do and what would stop it, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig

from sparseforge_ds.extras.planner.dry_run import dry_run
from sparseforge_ds.model.pretrained import check_attention, find_model, load_pretrained
from sparseforge_ds.train.trainer import main
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer, deepspeed_json, write_json, write_model, write_text
from tests.tiny_models import tiny_llama, tiny_mixture


@pytest.fixture
def dry(tmp_path, capsys, monkeypatch):
    """Run it on tiny inputs: (exit code, stdout, stderr)."""
    model = write_model(tmp_path / "model")
    text = write_text(tmp_path / "text.jsonl")

    def run(content=None, **flags):
        path = write_json(tmp_path / "ds.json", content or deepspeed_json())
        defaults = {"model": model, "dataset": text, "seq_length": 32, "output_dir": tmp_path / "runs" / "run"}
        words = [str(word) for name, value in (defaults | flags).items() for word in (f"--{name}", value)]
        capsys.readouterr()
        before = sorted(tmp_path.rglob("*"))
        code = main(["--deepspeed", str(path), "--dry_run", *words], dry_run)
        assert sorted(tmp_path.rglob("*")) == before
        return code, *capsys.readouterr()

    return run


def test_it_describes_the_run(dry):
    content = {**deepspeed_json(3, low_rank={"k": 8}), "bf16": {"enabled": "auto"}}
    code, text, errors = dry(content, gpus=4, max_steps=100, global_batch=8)
    assert (code, errors) == (0, "")
    for part in (
        "dry run for 4 ranks",
        "ZeRO-3, bfloat16",  # of the GPUs that are meant, not of this machine
        "8 x 32 tokens = 2 a rank x 1 accumulated x 4 ranks",
        "heating 0-25, hardening 25-75, frozen 75-100",
        "SLoRB, a number for 8 inputs",
        "2:4 in 14 weights",
        "25,600 tokens, 100.0%",
        "text.jsonl, 3,304 bytes",
        "reserve (assumed)",
        "whether the disk of those machines has room",
        "the text beyond the first record of each file",
    ):
        assert part in text
    hub = text.split("not checked")[1]
    assert "hub" not in hub  # everything is here


def test_a_queued_command_that_has_nothing_to_resume_yet_needs_the_disk_of_a_run(dry):
    def at_once(**flags: str) -> str:
        return re.search(r"at once on disk (.*)", dry(keep_checkpoints=0, save_every=1, **flags)[1])[1]

    assert at_once(resume="auto") == at_once()


def test_tokens_of_streams_are_room_on_the_disk(dry, tmp_path):
    _, text, _ = dry(dataset=f"stream:{tmp_path / 'text.jsonl'}", max_steps=100, global_batch=8)
    assert "streams       50.0 KiB of tokens, which stay in the run folder" in text


def test_one_rank_speaks_for_all(dry, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "x 2 ranks" in dry()[1]
    monkeypatch.setenv("RANK", "1")
    assert dry() == (0, "", "")


def _run_in_the_way(folder: Path) -> dict[str, object]:
    (folder / "old" / "checkpoints" / "step_000010").mkdir(parents=True)
    return {"output_dir": folder / "old"}


def _no_bos(folder: Path) -> dict[str, object]:
    byte_tokenizer(bos=False).save_pretrained(folder / "model")
    return {"document_frame": "both"}


def _file_in_the_way(folder: Path) -> dict[str, object]:
    (folder / "file").write_text("")
    return {"output_dir": folder / "file" / "run"}


def _empty_text(folder: Path) -> dict[str, object]:
    (folder / "empty.txt").write_text("")
    return {"dataset": folder / "empty.txt"}


def _other_teacher(folder: Path) -> dict[str, object]:
    return {"teacher": write_model(folder / "teacher", tiny_llama(vocab_size=300))}


def _experts(folder: Path) -> dict[str, object]:
    return {"model": write_model(folder / "mixture", tiny_mixture(Qwen3MoeConfig, vocab_size=BYTE_VOCABULARY))}


def test_probes_at_outputs_of_experts_are_refused(dry, tmp_path):
    code, _, errors = dry(deepspeed_json(importance="hutchinson"), gpus=2, **_experts(tmp_path))
    assert code == 1
    assert re.search(r"displaces outputs .* model\.layers\.1\.mlp\.experts\.gate_up_proj \(2 in all\) has no", errors)
    content = deepspeed_json(importance="hutchinson", curvature={"per_token": False})
    assert dry(content, gpus=2, **_experts(tmp_path))[0] == 0


def test_sparsegpt_on_fused_experts_is_refused(dry, tmp_path):
    content = deepspeed_json(method="naive_retrain", importance="sparsegpt")
    code, _, errors = dry(content, gpus=2, **_experts(tmp_path))
    assert code == 1
    assert re.search(r'importance "sparsegpt" needs the inputs .* which model\.layers\.\d\.mlp\.experts\.', errors)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (lambda _: {"gpus": 3}, "cannot be divided into micro-batches for 3 ranks"),
        (lambda _: {"gpus": 2, "gpu_memory": 4.001}, r"a GPU needs \d\.\d GiB, in .*, and has 4\.001"),
        (lambda _: {"gpus": 2, "seq_length": 65}, "has 64 positions"),
        (lambda _: {"gpus": 2, "dataset": "./nothing.txt"}, "no such file"),
        (lambda _: {"gpus": 2, "teacher_logits": "./nothing"}, "no such folder; make it by sparseforge teach"),
        (lambda _: {"gpus": 2, "model": "nobody/no-such-model"}, "check the name and the network"),
        (lambda _: {"gpus": 2, "resume": "True"}, "no run in .* start it without --resume"),
        (
            lambda _: {"gpus": 2, "attn_implementation": "nothing"},
            "--attn_implementation nothing: .* cannot be computed",
        ),
        (_run_in_the_way, "already holds a run"),
        (_file_in_the_way, "file is a file, not a folder; give a folder"),
        (_no_bos, "--document_frame both: the tokenizer has no BOS token; use eos"),
        (_empty_text, "--dataset .*: empty.txt, 0 bytes: there is no text in it"),
        (_other_teacher, "--teacher .* vocabulary has 300 entries"),
    ],
)
def test_what_would_stop_the_run_is_the_error(dry, tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, errors = dry(**flags(tmp_path))
    assert code == 1
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert re.search(message, errors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "OneBitAdam communicates compressed moments"),
        ({"zero_optimization": {"stage": "3"}}, 'zero_optimization.stage = "3" is not valid'),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        # It is on GPUs that fp16 is chosen.
        ({"zero_optimization": {"stage": 0}, "fp16": {"enabled": "auto"}}, "fp16 at ZeRO stage 0"),
    ],
)
def test_what_a_run_refuses_a_dry_run_refuses(dry, changes, message):
    code, text, errors = dry({**deepspeed_json(), **changes}, gpus=2)
    assert (code, text) == (1, "")
    assert errors.startswith("error: ") and errors.count("\n") == 1 and message in errors


def test_attention_of_another_machine_is_not_looked_for_on_this_one(dry):
    """Only a run itself asks for the package."""
    model = find_model("stdlib_llama", "--model")
    check_attention(model, "flash_attention_2", elsewhere=True)
    check_attention(model, "eager", elsewhere=False)
    if importlib.util.find_spec("flash_attn") is None:
        with pytest.raises(ValueError, match="--attn_implementation flash_attention_2: stdlib_llama cannot be"):
            check_attention(model, "flash_attention_2", elsewhere=False)
    code, text, _ = dry(deepspeed_json(), gpus=2, attn_implementation="eager")
    assert code == 0
    scores = 2 * 32 * 32 * 4 * 4 / 1024  # sequences of a rank, pairs of tokens, heads, bytes
    line = f"memory: eager attention's scores of all pairs of tokens, {scores:.1f} KiB a layer, several times"
    assert line in text.split("not checked")[1]


def test_the_mask_of_documents_is_not_in_the_plan(dry):
    line = f"memory: the mask of --document_attention, {2 * 32 * 32 / 1024:.1f} KiB with sdpa"
    assert line in dry(gpus=2, document_attention="True")[1].split("not checked")[1]
    assert "memory: " not in dry(gpus=2)[1].split("not checked")[1]


def test_the_attention_that_is_asked_for_is_loaded():
    folder = find_model("stdlib_llama", "--model").folder
    for asked, result in (("eager", "eager"), ("sdpa", "sdpa"), (None, "sdpa")):
        model = load_pretrained(folder, "--model", torch.float32, None, attn_implementation=asked)
        assert model.config._attn_implementation == result


def test_an_allow_dense_that_is_not_needed_is_said_once(dry):
    code, text, _ = dry(gpus=2, allow_dense="*.nothing")
    assert code == 0 and text.count("*.nothing: not needed, it matches no weight that is undecided") == 1


def test_a_layout_that_cannot_be_estimated_is_not_an_error(dry):
    content = deepspeed_json()
    content["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True}
    code, text, _ = dry(content, gpus=2)
    assert code == 0
    assert "memory: " in text.split("not checked")[1]
