"""`sparseforge generate`: the text is transformers' own, and what cannot speak says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparseforge_ds.cli import generate
from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate import finished_model
from sparseforge_ds.export.formats import export
from sparseforge_ds.extras.packed24 import cpu_kernel
from tests.sparse_folders import MODELS, ModelSource
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer, write_json, write_model

PROMPT = "Once upon"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = MODELS["llama"](vocab_size=BYTE_VOCABULARY, bos_token_id=256, eos_token_id=257)
    return write_model(tmp_path_factory.mktemp("dense") / "model", model)


@pytest.mark.parametrize("format", ["hf", "packed24"])
def test_both_exports_continue_a_text_alike(
    assets: Path, tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Continue with a real model, whose likeliest token is likelier by more than rounding."""
    folder = assets / "models" / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    export(ModelSource(model, folder, torch.float32), tmp_path / format, format, skip_proof=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / format)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    assert main(["generate", str(tmp_path / format), PROMPT, "--max_new_tokens", "12"]) == 0
    output = capsys.readouterr()
    assert output.out == tokenizer.decode(expected[0], skip_special_tokens=True) + "\n"
    assert output.out.startswith(PROMPT) and len(output.out) > len(PROMPT) + 12
    assert "12 tokens in " in output.err and "a second, on cpu" in output.err


@pytest.mark.parametrize("format", ["hf", "packed24"])
def test_the_kernel_is_built_before_the_clock_starts(
    assets: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Build the kernel of a packed model alone; other models need none."""
    folder = assets / "models" / "stories260K"
    source = ModelSource(AutoModelForCausalLM.from_pretrained(folder), folder, torch.float32)
    export(source, tmp_path / "out", format, skip_proof=True)
    events: list[str] = []
    clock = SimpleNamespace(perf_counter=lambda: events.append("clock") or float(len(events)))
    monkeypatch.setattr(generate, "time", clock)
    monkeypatch.setattr(cpu_kernel, "load_cpu_kernel", lambda: events.append("kernel"))
    assert main(["generate", str(tmp_path / "out"), PROMPT, "--max_new_tokens", "2"]) == 0
    assert events == [*(["kernel"] if format == "packed24" else []), "clock", *2 * ["clock"]]  # one a token


def test_the_compiler_is_no_part_of_the_speed(
    dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [0.0, 2.0, 32.0, 40.0]  # the prompt, the compiler and the recording
    times = slow + [40.0 + 0.125 * (token + 1) for token in range(17)]
    assert (
        generate.describe_speed(times, compiles=True)
        == "20 tokens in 42.1 s, compiling included; compiled, 8.0 a second"
    )
    assert generate.describe_speed(times, compiles=False) == "20 tokens in 42.1 s, 0.5 a second"
    assert (
        generate.describe_speed(times[:6], compiles=True) == "5 tokens in 40.2 s, compiling included"
    )  # hardly any compiled
    # A static cache is what has transformers compile.
    monkeypatch.setattr(generate, "cache_settings", lambda model: {"cache_implementation": "static"})
    for flags, is_compiled in (([], True), (["--eager"], False)):
        assert main(["generate", str(dense), PROMPT, "--max_new_tokens", "2", *flags]) == 0
        assert ("compiling included" in capsys.readouterr().err) == is_compiled


def test_the_cache_is_static_on_cuda_alone(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers must be able to compile the whole model; --eager leaves it out."""
    cuda = torch.device("cuda")
    cpu = torch.device("cpu")
    static = {"cache_implementation": "static"}
    assert generate.cache_settings(SimpleNamespace(device=cuda, _can_compile_fullgraph=True)) == static
    assert generate.cache_settings(SimpleNamespace(device=cuda, _can_compile_fullgraph=False)) == {}
    assert generate.cache_settings(SimpleNamespace(device=cpu, _can_compile_fullgraph=True)) == {}
    monkeypatch.setattr(generate, "cache_settings", lambda model: {"cache_implementation": "refused"})
    assert main(["generate", str(dense), PROMPT, "--max_new_tokens", "2", "--eager"]) == 0
    assert main(["generate", str(dense), PROMPT, "--max_new_tokens", "2"]) != 0


def test_samples_repeat_with_their_seed(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert (
            main(["generate", str(dense), PROMPT, "--max_new_tokens", "9", "--temperature", "1", "--seed", seed]) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_the_models_own_settings_of_generation_do_not_act(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the likeliest token, or any of all, whatever generation_config.json says."""
    own = json.loads((dense / "generation_config.json").read_text())
    settings = {"repetition_penalty": 5.0, "num_beams": 4, "do_sample": True, "top_k": 1, "max_length": 5}
    folder = Path(shutil.copytree(dense, tmp_path / "set"))
    write_json(folder / "generation_config.json", own | settings)
    for flags in ([], ["--temperature", "1", "--seed", "3"]):
        texts = []
        for model in (dense, folder):
            assert main(["generate", str(model), PROMPT, "--max_new_tokens", "12", *flags]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1], flags
    # but a text ends where the model says that it ends
    model, tokenizer = AutoModelForCausalLM.from_pretrained(dense), AutoTokenizer.from_pretrained(dense)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    third = int(model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, -1])
    write_json(folder / "generation_config.json", own | {"eos_token_id": [257, third]})
    assert main(["generate", str(folder), PROMPT, "--max_new_tokens", "12"]) == 0
    told = capsys.readouterr().err.splitlines()[-1]
    assert int(told.split(" tokens in ")[0]) <= 3, told


def test_chat_uses_the_template(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(dense), PROMPT, "--chat"]) == 2
    assert "has no chat template; leave out --chat" in capsys.readouterr().err
    AutoModelForCausalLM.from_pretrained(dense).save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %}<{{ turn['content'] }}>{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), PROMPT, "--chat", "--max_new_tokens", "4"]) == 0
    assert PROMPT not in capsys.readouterr().out
    tokenizer.chat_template = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    tokenizer.save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), PROMPT, "--chat"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {tmp_path}: the tokenizer's chat template refuses") and errors.count("\n") == 1


def test_models_and_prompts_that_cannot_be_continued_are_refused(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Folders of a run, and of models that are each damaged in one way.
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    damaged, odd = (Path(shutil.copytree(dense, tmp_path / name)) for name in ("damaged", "odd"))
    (damaged / "model.safetensors").write_bytes((dense / "model.safetensors").read_bytes()[:-5])
    content = json.loads((dense / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**content, "hidden_size": "wide"}))
    zero = Path(shutil.copytree(dense, tmp_path / "zero"))
    (zero / "config.json").write_text(json.dumps({**content, "num_attention_heads": 0}))
    apart = write_model(tmp_path / "apart", MODELS["llama"](vocab_size=60))
    # Each is refused in one line, and nothing is generated.
    capsys.readouterr()
    for model, more, message in (
        (apart, [], f"{apart}: its tokenizer gives token 220, the model has 60 embeddings; tokenizer and weights do"),
        (damaged, [], "damaged/model.safetensors: not a readable safetensors file (Error while deserializing header: "),
        (odd, [], "'hidden_size': TypeError: Field 'hidden_size' expected int, got str"),
        (zero, [], "num_attention_heads is 0; it must be 1 or more"),
        (tmp_path / "run", [], "of a run make one first: sparseforge consolidate"),
        (dense, ["--max_new_tokens", "0"], "--max_new_tokens 0: use 1 or more"),
        (dense, ["--temperature", "-1"], "--temperature -1.0: use 0, or a number like 0.7"),
        (dense, ["--temperature", "1e-45"], "use 0, or a number like 0.7, at least 0.001"),
        (dense, ["--seed", "1" + "0" * 22], "--seed 10000000000000000000000: use 0 or more, below 2^63"),
        (dense, ["--seed", "7"], "--seed 7: without --temperature nothing is drawn; give that too, or leave it out"),
        (dense, ["--adapter", str(tmp_path / "nowhere")], "nowhere: no such folder or file; give"),
    ):
        assert main(["generate", str(model), PROMPT, *more]) == 2, message
        output = capsys.readouterr()
        assert message in output.err and output.out == ""


def test_what_does_not_fit_the_positions_is_said_before_weights_are_read(
    dense: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt, or the flag, if one is given."""
    monkeypatch.setattr(finished_model, "load_model", lambda *_: pytest.fail("the model was loaded"))
    length = len(AutoTokenizer.from_pretrained(dense)("a" * 20)["input_ids"])
    for prompt, flags, message in (
        ("a" * 20, ["--max_new_tokens", "60"], f"--max_new_tokens 60: PROMPT takes {length} of the 64 positions of"),
        ("a" * 20, ["--max_new_tokens", "60"], f"; give {64 - length} or less, or shorten PROMPT"),
        ("a" * 64, [], f"error: PROMPT: takes {length + 44} tokens, and {dense} has 64 positions; shorten it"),
        ("a" * 64, ["--max_new_tokens", "1"], f"error: PROMPT: takes {length + 44} tokens, and {dense} has 64"),
    ):
        assert main(["generate", str(dense), prompt, *flags]) == 2
        assert message in capsys.readouterr().err


def test_the_last_position_can_be_written(dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    length = len(AutoTokenizer.from_pretrained(dense)("a" * 20)["input_ids"])
    assert main(["generate", str(dense), "a" * (20 + 63 - length)]) == 0
    assert "1 tokens in " in capsys.readouterr().err


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_model_of_nan_says_so(
    dense: Path, tmp_path: Path, temperature: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refuse such logits, whose likeliest token would be 0 for ever, and a sample a traceback."""
    folder = shutil.copytree(dense, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")

    def refuses(name: str, value: float, why: str) -> None:
        save_file(tensors | {name: tensors[name].clone().fill_(value)}, folder / "model.safetensors", {"format": "pt"})
        assert main(["generate", str(folder), PROMPT, "--max_new_tokens", "4", "--temperature", temperature]) == 1
        errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert errors == [f"error: {folder}: its logits are no finite numbers, so that no token is likelier: {why}"]

    down = "model.layers.1.mlp.down_proj.weight"
    refuses(down, float("nan"), f"{down} is not finite; give a sound model")
    overflow = "all weights are finite, so sums overflow in float32; give a sound model"
    refuses("model.norm.weight", 3.4e38, overflow)
    refuses("lm_head.weight", 3.4e38, overflow)


def test_a_dense_model_of_integers_is_refused(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(dense, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, folder / "model.safetensors", {"format": "pt"})
    for command in (["generate", str(folder), PROMPT], ["permute", str(folder), str(tmp_path / "out")]):
        assert main(command) == 2
        assert f"{folder}: {name} is stored as torch.int8, which transformers would cast" in capsys.readouterr().err
