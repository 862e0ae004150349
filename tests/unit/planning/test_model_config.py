"""Which models are known without the hub, which are none that can be trained here, and a hub that does not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from transformers import CLIPConfig, Gemma3Config, PretrainedConfig, T5Config, ViTConfig

from sparseforge_ds.model import hub
from sparseforge_ds.model.tokenizer import load_tokenizer
from sparseforge_ds.planning.architecture import bare_model
from sparseforge_ds.planning.model_config import known_models, read_model_config
from sparseforge_ds.train.pretrained import find_model

BILLIONS = {
    "meta-llama/Llama-2-13b-hf": 13.0,
    "meta-llama/Llama-2-70b-chat-hf": 69.0,
    "meta-llama/Meta-Llama-3-8B": 8.03,
    "meta-llama/Meta-Llama-3-70B-Instruct": 70.6,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.1-70B": 70.6,
    "meta-llama/Meta-Llama-3.1-405B": 406.0,
    "meta-llama/Llama-3.2-1B": 1.23,
    "meta-llama/Llama-3.2-3B": 3.21,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.1,
    "HuggingFaceTB/SmolLM2-135M": 0.135,
    "HuggingFaceTB/SmolLM2-360M": 0.362,
    "HuggingFaceTB/SmolLM2-1.7B": 1.71,
    "mistralai/Mistral-7B-v0.1": 7.24,
    "mistralai/Mistral-7B-Instruct-v0.3": 7.25,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 141.0,
    "Qwen/Qwen2.5-0.5B": 0.494,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B-Instruct": 7.62,
    "Qwen/Qwen2.5-14B": 14.8,
    "Qwen/Qwen2.5-32B": 32.8,
    "Qwen/Qwen2.5-72B": 72.7,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B-Base": 1.72,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B-Base": 8.19,
    "Qwen/Qwen3-14B-Base": 14.8,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B": 235.0,
    "Qwen/Qwen1.5-MoE-A2.7B": 14.3,
    "allenai/OLMoE-1B-7B-0924": 6.92,
    "allenai/OLMo-2-1124-7B": 7.3,
    "allenai/OLMo-2-1124-13B": 13.7,
    "deepseek-ai/DeepSeek-V2-Lite": 15.7,
    "openai/gpt-oss-20b": 20.9,
    "openai/gpt-oss-120b": 116.8,
    "microsoft/phi-1_5": 1.42,
    "microsoft/phi-2": 2.78,
    "microsoft/Phi-3-mini-4k-instruct": 3.82,
    "microsoft/phi-4": 14.7,
    "microsoft/Phi-4-mini-instruct": 3.84,
    "google/gemma-2b": 2.51,
    "google/gemma-7b-it": 8.54,
    "google/gemma-2-2b": 2.61,
    "google/gemma-2-9b": 9.24,
    "google/gemma-2-27b": 27.2,
    "google/gemma-3-1b-pt": 1.0,
    "tiiuae/falcon-7b": 6.92,
    "tiiuae/falcon-40b-instruct": 41.3,
}
"""Parameters as stated for each size, to the digits that are stated; tied ones once."""


def test_known_models_have_the_size_that_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "why_unreachable", lambda: pytest.fail("the hub was asked"))
    for name, billions in BILLIONS.items():
        model = bare_model(read_model_config(name))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=5e-3), name
    sizes = [known_models()[name] for name in BILLIONS]
    assert [name for name, values in known_models().items() if values not in sizes] == ["meta-llama/Llama-2-7b-chat-hf"]


@pytest.mark.parametrize("make", [ViTConfig, CLIPConfig, T5Config])
def test_what_is_no_causal_language_model_is_one_error(make: type[PretrainedConfig], tmp_path: Path) -> None:
    """Before anything else of it is looked at; a ViT has no vocabulary at all."""
    make().save_pretrained(tmp_path)
    for read in (read_model_config, find_model):
        with pytest.raises(ValueError, match=r"^--model .*: an? \w+ model is no causal language model; what") as raised:
            read(str(tmp_path), "--model")
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_a_vocabulary_inside_of_the_text_config(tmp_path: Path) -> None:
    """A model of text and images, whose language model is trained."""
    text = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    Gemma3Config(text_config=text).save_pretrained(tmp_path)
    config = read_model_config(str(tmp_path))
    assert config.get_text_config().vocab_size == 64 and not hasattr(config, "vocab_size")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """An endpoint that takes connections and says nothing, as some firewalls make of the hub; and those it took."""
    taken: list[socket.socket] = []
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                taken.append(server.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "SECONDS", 0.5)
    monkeypatch.setenv("NO_PROXY", "*")
    hub._asked.cache_clear()
    yield taken
    hub._asked.cache_clear()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for each in taken:
        each.close()


def test_a_hub_that_does_not_answer_is_asked_once_and_briefly(silent: list[socket.socket]) -> None:
    """huggingface_hub would ask five times, with pauses that grow, for every file that a folder may have."""
    for read in (read_model_config, find_model):
        with pytest.raises(ValueError, match=r"nobody/no-such-model: .* cannot be reached \(.*; check the name and"):
            read("nobody/no-such-model", "--model")
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        load_tokenizer("nobody/no-such-model")
    # Beside it, transformers may look up by itself who is calling, once and briefly as well.
    assert [each.recv(6) for each in silent].count(b"HEAD /") == 1 and len(silent) <= 2
    assert read_model_config("Qwen/Qwen3-30B-A3B").num_experts == 128


def test_a_hub_that_answers_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in (hub.why_unreachable() or "")
