"""Tokenizers from local folders: the tokens of the trained model, framed once, and the same ones in the export."""

from __future__ import annotations

import itertools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer, DeepseekV2Config, GPT2Config, LlamaConfig, OPTConfig, Qwen2Config, Qwen3Config

from sparseforge_ds.cli.main import main
from sparseforge_ds.data.documents import PromptAndCompletion
from sparseforge_ds.data.tokenization import encode_trained, token_dtype, tokenize
from sparseforge_ds.evaluate import perplexity
from sparseforge_ds.evaluate.finished_model import load_tokenizer as load_for_evaluation
from sparseforge_ds.export.model_folder import copy_model_files
from sparseforge_ds.model.tokenizer import check_vocabulary, read_tokenizer
from tests.tiny_folders import byte_tokenizer, write_model

CONFIGS = {
    "llama2": LlamaConfig(vocab_size=32000, bos_token_id=1, eos_token_id=2),
    "qwen": Qwen3Config(vocab_size=151936, bos_token_id=151643, eos_token_id=151645),
    "deepseek_llm": LlamaConfig(vocab_size=102400, bos_token_id=100000, eos_token_id=100001),
    "gpt2": GPT2Config(),
}
FRAMES = {"llama2": (1, None), "qwen": (None, 151643), "deepseek_llm": (100000, None), "gpt2": (50256, None)}
"""Tokens before and after every document."""


@pytest.fixture
def folder(assets, tmp_path):
    """Write the bare tokenizer file of a family and the model's config, nothing else."""

    def build(name, **files):
        path = tmp_path / name
        shutil.copytree(assets / "tokenizers" / name, path)
        path.chmod(0o755)
        CONFIGS[name].save_pretrained(path)
        for file, content in files.items():
            (path / f"{file}.json").write_text(json.dumps(content))
        return path

    return build


def stories(assets, count=60):
    lines = (assets / "text" / "tinystories" / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line)["text"].strip() for line in lines[:count]]


@pytest.mark.parametrize("name", CONFIGS)
def test_documents_are_framed_once_and_the_export_gives_the_same_tokens(folder, assets, tmp_path, name):
    path = folder(name)
    texts = stories(assets)
    tokenizer = read_tokenizer(path)
    check_vocabulary(tokenizer, CONFIGS[name])
    assert token_dtype(tokenizer) == ("uint32" if name in ("qwen", "deepseek_llm") else "uint16")
    rows = tokenize(texts, tokenizer)
    front, back = FRAMES[name]
    bare = tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert rows == [[*([] if front is None else [front]), *ids, *([] if back is None else [back])] for ids in bare]
    assert all(front not in ids and back not in ids for ids in bare)
    assert [tokenizer.decode(ids) for ids in bare] == texts

    run = tmp_path / "run"
    tokenizer.save_pretrained(run)  # as the run folder has it
    export = tmp_path / "export"
    export.mkdir()
    source = SimpleNamespace(model_folder=run, model_config=CONFIGS[name].to_dict(), dtype=torch.bfloat16)
    copy_model_files(source, export)
    plain = AutoTokenizer.from_pretrained(export)
    assert plain(texts, add_special_tokens=False)["input_ids"] == bare
    assert (plain.bos_token_id, plain.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert tokenize(texts, load_for_evaluation(str(export))) == rows


def test_tokens_of_a_sentencepiece_model_are_sentencepieces(folder, assets):
    """transformers 5 alone reads such a folder without the space before a text, in silence."""
    path = folder("llama2")
    texts = stories(assets)
    pieces = SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    tokenizer = read_tokenizer(path)
    assert tokenizer(texts, add_special_tokens=False)["input_ids"] == [pieces.encode(text) for text in texts]
    assert tokenizer("Hello", add_special_tokens=False)["input_ids"] == [15043]
    assert AutoTokenizer.from_pretrained(path)("Hello", add_special_tokens=False)["input_ids"] == [10994]


def test_the_normalization_of_a_sentencepiece_model_is_kept_and_saved(assets, tmp_path):
    """books-6m was trained by sentencepiece itself, which maps line ends and runs of spaces to one space."""
    folder = assets / "models" / "books-6m"
    book = next((assets / "text" / "books").glob("Great-*.txt")).read_text()
    texts = [text for text in book.split("\n\n")[:400] if text.strip()]
    pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    read_tokenizer(folder).save_pretrained(tmp_path)
    for tokenizer in (read_tokenizer(folder), AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer(texts, add_special_tokens=False)["input_ids"] == [pieces.encode(text) for text in texts]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_a_class_that_gives_other_tokens_than_sentencepiece_is_refused(folder):
    path = folder("llama2", tokenizer_config={"tokenizer_class": "TokenizersBackend"})
    with pytest.raises(ValueError, match="TokenizersBackend that gives other tokens than.*LlamaTokenizer"):
        read_tokenizer(path)
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assert read_tokenizer(path)("Hello", add_special_tokens=False)["input_ids"] == [15043]


def test_what_tokenizer_config_says_of_bos_and_eos_is_not_overruled(folder):
    message = {"eos_token": "<\uff5cend\u2581of\u2581sentence\uff5c>"}
    tokenizer = read_tokenizer(folder("deepseek_llm", tokenizer_config=message))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 100001)


@pytest.mark.parametrize("config", [LlamaConfig(), Qwen2Config(), GPT2Config(), OPTConfig(), DeepseekV2Config()])
@pytest.mark.parametrize("files", [{}, {"tokenizer_config.json": "{}"}])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path, config, files):
    config.save_pretrained(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        read_tokenizer(tmp_path)


def test_a_tokenizer_with_tokens_beyond_the_embedding_is_refused():
    tokenizer = byte_tokenizer()
    check_vocabulary(tokenizer, LlamaConfig(vocab_size=258))
    with pytest.raises(ValueError, match="1 tokens without an embedding, the first is '</s>' with id 257 in .* of 257"):
        check_vocabulary(tokenizer, LlamaConfig(vocab_size=257))


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
HOSTILE = {
    "merges outside the vocabulary": {"model": {"merges": [["zz", "qq"]]}},
    "no unknown token": {"model": {"type": "WordLevel", "unk_token": "[NOPE]", "vocab": {"<s>": 256, "</s>": 257}}},
    "a bad expression": {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(["}}},
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_hostile_tokenizer_is_one_error(tmp_path, fault, capsys):
    """Catch what the tokenizers library raises: Exception itself, a panic of its Rust code, or nothing at all."""
    model = write_model(tmp_path / "model")
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    for key, change in HOSTILE[fault].items():
        content[key] = change if content[key] is None or key != "model" else {**content[key], **change}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="^its tokenizer cannot be read") as refused:
        read_tokenizer(model)
    assert "\n" not in str(refused.value)
    assert main(["generate", str(model), "Once"]) == 2
    assert "error: " in capsys.readouterr().err


def test_a_text_at_which_a_tokenizer_fails_is_one_error(capsys, tmp_path):
    """Backtrack for few texts, and not for the one that is tried when the tokenizer is loaded."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(q+)+!!"), "isolated")
    model = write_model(tmp_path / "model")
    tokenizer.save_pretrained(model)
    text = "q" * 60
    for use in (
        lambda: tokenize(["fine", text], read_tokenizer(model)),
        lambda: encode_trained([PromptAndCompletion("fine", text)], read_tokenizer(model)),
        lambda: perplexity.text_to_ids(load_for_evaluation(str(model)), text, special=False),
    ):
        with pytest.raises(ValueError, match="the tokenizer cannot read the text .*retry-limit"):
            use()
    assert main(["generate", str(model), text]) == 2
    assert f"error: {model}: the tokenizer cannot read the text" in capsys.readouterr().err


ODD = {
    "tokenizer_config.json": ("bos_token", "added_tokens_decoder", "tokenizer_class", "auto_map", "model_max_length"),
    "tokenizer.json": ("model", "normalizer", "pre_tokenizer", "added_tokens"),
}


def test_values_of_other_types_are_one_error(tmp_path):
    """Whatever transformers or the tokenizers library makes of them."""
    model = write_model(tmp_path / "model")
    refused = 0
    for file, keys in ODD.items():
        content = json.loads((model / file).read_text())
        for key, odd in itertools.product(keys, (5, "x", [5], {"a": 5})):
            (model / file).write_text(json.dumps({**content, key: odd}))
            try:
                read_tokenizer(model)
            except ValueError as error:
                refused += 1
                assert "\n" not in str(error), (key, odd)
        (model / file).write_text(json.dumps(content))
    assert refused > 25
