"""Refusal of models that cannot be trained here, and a hub that does not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from transformers import CLIPConfig, Gemma3Config, PretrainedConfig, T5Config, ViTConfig

from sparseforge_ds.model import hub_access
from sparseforge_ds.model.model_config import read_model_config
from sparseforge_ds.model.pretrained import find_model
from sparseforge_ds.model.registration import load_config
from sparseforge_ds.model.tokenizer import read_tokenizer


@pytest.mark.parametrize("make", [ViTConfig, CLIPConfig, T5Config])
def test_what_is_no_causal_language_model_is_one_error(make: type[PretrainedConfig], tmp_path: Path) -> None:
    """Before anything else of it is looked at; a ViT has no vocabulary at all."""
    make().save_pretrained(tmp_path)
    for read in (read_model_config, find_model):
        with pytest.raises(ValueError, match=r"^--model .*: an? \w+ model is no causal language model; what") as raised:
            read(str(tmp_path), "--model")
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_a_vocabulary_inside_of_the_text_config_is_read(tmp_path: Path) -> None:
    """Read a model of text and images, whose language model is trained."""
    text = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    Gemma3Config(text_config=text).save_pretrained(tmp_path)
    config = read_model_config(str(tmp_path))
    assert config.get_text_config().vocab_size == 64 and not hasattr(config, "vocab_size")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Serve an endpoint that takes connections and says nothing, as some firewalls do; and return those it took."""
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
    monkeypatch.setattr(hub_access, "SECONDS", 0.5)
    monkeypatch.setenv("NO_PROXY", "*")
    hub_access.ask_hub.cache_clear()
    yield taken
    hub_access.ask_hub.cache_clear()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for item in taken:
        item.close()


def test_a_hub_that_does_not_answer_is_asked_once_and_briefly(silent: list[socket.socket]) -> None:
    """huggingface_hub would ask five times, with pauses that grow, for every file that a folder may have."""
    for read in (read_model_config, find_model):
        with pytest.raises(ValueError, match=r"nobody/no-such-model: .* cannot be reached \(.*; check the name and"):
            read("nobody/no-such-model", "--model")
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        read_tokenizer("nobody/no-such-model")
    with pytest.raises(
        ValueError, match="it: no such folder, and no model that can be had from the hub .*cannot be reached"
    ):
        load_config("nobody/no-such-model", "it")
    # Beside it, transformers may look up by itself who is calling, once and briefly as well.
    assert [item.recv(6) for item in silent].count(b"HEAD /") == 1 and len(silent) <= 2
    assert read_model_config("Qwen/Qwen3-14B").hidden_size == 5120


def test_a_hub_that_answers_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in (hub_access.why_unreachable() or "")
    assert hub_access.why_unreachable(Path(__file__).parent) is None  # a folder needs no hub
