from __future__ import annotations

import gzip
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, LlamaConfig, LlamaForCausalLM

from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate import finished_model, perplexity
from sparseforge_ds.evaluate.finished_model import load_model, load_tokenizer, prune_by_magnitude
from sparseforge_ds.evaluate.perplexity import LONGEST_DEFAULT, Perplexity, Scoring, max_positions, measure
from sparseforge_ds.evaluate.scored_text import read_documents, read_text
from sparseforge_ds.mask.pattern import NM, Block
from sparseforge_ds.ranks import Ranks
from tests.distributed import run_distributed
from tests.tiny_folders import BYTE_VOCABULARY, byte_tokenizer, write_model, write_text
from tests.tiny_models import tiny_gpt2, tiny_llama
from tests.unit.model.test_uncovered import tiny

DOCUMENTS = ["Once upon a time there was a cat.", "The cat sat. It was happy!", "One day a big dog came."]


def naive_nll(model: torch.nn.Module, ids: list[int], first_scored: int = 1) -> tuple[float, int]:
    """Sum over the scored tokens, one token at a time."""
    total = 0.0
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    for position in range(first_scored, len(ids)):
        total -= float(torch.log_softmax(logits[position - 1], -1)[ids[position]])
    return total, len(ids) - first_scored


@pytest.mark.parametrize(("protocol", "length"), [("windows", LONGEST_DEFAULT), ("documents", 5000)])
def test_the_default_length_fits_the_model_and_the_dense_one(protocol: perplexity.Protocol, length: int) -> None:
    long, short = (LlamaConfig(max_position_embeddings=positions) for positions in (5000, 40))
    tokenizer = byte_tokenizer()
    text = ["a" * 6000]
    for configs, expected in (([long], length), ([long, short], 40), ([short, long], 40)):
        cut = perplexity.cut_text(tokenizer, text, Scoring(protocol), configs)
        assert cut.seq_length == len(cut.passages[0].tokens) == expected


def test_a_table_has_empty_cells_without_a_dense_model() -> None:
    score = {"text": "a", "perplexity": 2.0, "dense_perplexity": None, "kl": None, "tokens": 7}
    lines = perplexity.table([score, {**score, "dense_perplexity": 1.5, "kl": 0.25}]).splitlines()
    assert lines[2:] == ["| a | 2.0000 |  |  | 7 |", "| a | 2.0000 | 1.5000 | 0.25000 | 7 |"]


def test_documents_agree_with_a_naive_loop(stories: str) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    score = measure(load_model(stories), load_tokenizer(stories), DOCUMENTS, Scoring("documents", batch_size=2))
    total, count = 0.0, 0
    for document in DOCUMENTS:
        nll, tokens = naive_nll(model, [1, *tokenizer(document, add_special_tokens=False)["input_ids"]])
        total, count = total + nll, count + tokens
    assert score.tokens == count and score.unscored == 0
    assert score.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)


@pytest.mark.parametrize(("seq_length", "stride"), [(16, None), (16, 16), (16, 5), (16, 1)])
def test_windows_agree_with_a_naive_loop(stories: str, seq_length: int, stride: int | None) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    score = measure(model.eval(), tokenizer, DOCUMENTS, Scoring("windows", seq_length, stride, batch_size=3))
    ids = tokenizer("\n\n".join(DOCUMENTS))["input_ids"]
    total, count = 0.0, 0
    scored_to = 0
    for start in range(0, len(ids) - seq_length + 1, stride or seq_length):
        first = max(scored_to - start, 1)
        nll, tokens = naive_nll(model, ids[start : start + seq_length], first)
        total, count = total + nll, count + tokens
        scored_to = start + seq_length
    assert (score.tokens, score.unscored) == (count, len(ids) - count)
    assert score.nll == pytest.approx(total / count, rel=1e-5)


def share_of_ranks(model: str) -> tuple[Perplexity, float]:
    ranks = Ranks()
    dense = load_model(model, "bfloat16")
    model_and_text = (load_model(model), load_tokenizer(model), DOCUMENTS * 3, Scoring("documents", batch_size=2))
    score = measure(*model_and_text, ranks=ranks, dense=dense)
    with pytest.raises(ValueError, match="^on rank 1: odd$"):
        ranks.all_or_raise(lambda: refuse() if ranks.rank == 1 else None)
    return score, score.nll


def refuse() -> None:
    raise ValueError("odd")


def test_the_number_is_the_same_at_any_number_of_ranks(stories: str) -> None:
    model_and_text = (load_model(stories), load_tokenizer(stories), DOCUMENTS * 3, Scoring("documents", batch_size=2))
    alone = measure(*model_and_text, dense=load_model(stories, "bfloat16"))
    for score, nll in run_distributed(share_of_ranks, 3, stories):
        assert score == alone and nll == alone.nll


def refused_on_ranks(model: str) -> str:
    with pytest.raises(ValueError) as refused:
        measure(load_model(model), load_tokenizer(model), DOCUMENTS, Scoring("documents", batch_size=1), ranks=Ranks())
    return str(refused.value)


def test_tokens_that_the_model_does_not_know_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They ended in an IndexError of torch; on a GPU, in an assertion on the device."""
    small = write_model(tmp_path / "small", tiny_llama(vocab_size=60))
    (tmp_path / "text.txt").write_text("\n".join(DOCUMENTS))
    for protocol, largest in (("documents", 256), ("windows", 220)):  # its BOS, and a space
        command = ["evaluate", str(small), "--text", str(tmp_path / "text.txt"), "--protocol", protocol]
        assert main([*command, "--seq_length", "16"]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"{small}: its tokenizer gives token {largest}, the model has 60 embeddings; tokenizer and" in error
    message, other = run_distributed(refused_on_ranks, 2, str(small))
    assert message == other and "gives token 256" in message


def test_tokens_that_the_text_does_not_have_need_no_embedding(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", tiny_llama(vocab_size=258))
    plain = measure(load_model(str(model)), load_tokenizer(str(model)), DOCUMENTS, Scoring("documents"))
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(model)
    assert len(load_tokenizer(str(model))) == 259
    assert measure(load_model(str(model)), load_tokenizer(str(model)), DOCUMENTS, Scoring("documents")) == plain


def test_wikitext2_joins_all_rows(stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["", " = A cat = \n", "", " The cat sat . \n", " It was happy . \n"] * 4
    dataset = Dataset.from_list([{"text": row} for row in rows])
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.to_json(tmp_path / "rows.jsonl")
    (tmp_path / "joined.txt").write_text("\n\n".join(rows))
    losses = []
    copies = [f"wikitext2:{tmp_path / name}" for name in ("rows.parquet", "rows.jsonl")]
    for text in (str(tmp_path / "joined.txt"), *copies):
        assert main(["evaluate", stories, "--text", text, "--seq_length", "32"]) == 0
        losses.append(json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"]["nll"])
    assert len(set(losses)) == 1
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write((tmp_path / "rows.jsonl").read_text())
    assert read_documents(str(tmp_path / "rows.jsonl.gz")) == read_documents(str(tmp_path / "rows.jsonl"))
    dataset.rename_column("text", "line").to_parquet(tmp_path / "line.parquet")
    assert main(["evaluate", stories, "--text", f"wikitext2:{tmp_path / 'line.parquet'}"]) == 2
    assert "no column 'text' (line)" in capsys.readouterr().err
    assert main(["evaluate", stories, "--text", f"wikitext2:{tmp_path}/joined.txt"]) == 2
    assert "joined.txt: cannot be read (give a file of" in capsys.readouterr().err
    assert main(["evaluate", stories, "--text", copies[0], "--limit", "3"]) == 2
    assert "--limit 3: wikitext2 is scored whole" in capsys.readouterr().err


def test_wikitext2_has_the_well_known_number_of_tokens(assets: Path) -> None:
    text = assets / "text" / "wikitext2" / "test.txt"
    folder = assets / "tokenizers" / "llama2"
    if not text.is_file() or not folder.is_dir():
        pytest.skip(f"no {text} or {folder}")
    processor = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    (document,) = read_documents(str(text))
    assert len(processor.encode(document)) + 1 == 341_469


def test_a_real_model_has_its_known_perplexity(
    stories: str, assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measure the first 40 held-out stories: the dense model is good, one-shot 2:4 breaks it."""
    text = str(assets / "text" / "tinystories" / "heldout.jsonl")
    command = ["evaluate", stories, "--text", text, "--limit", "40", "--json", str(tmp_path / "result.json")]
    assert main(command) == 0
    dense_record = json.loads((tmp_path / "result.json").read_text())
    assert main([*command, "--one_shot", "2:4"]) == 0
    pruned_record = json.loads((tmp_path / "result.json").read_text())
    assert (dense_record["zeros"], pruned_record["zeros"]) == (0.0, 0.5)
    assert "one-shot magnitude 2:4, float32, 50.0% of the matrices 0 on" in capsys.readouterr().out
    dense, pruned = dense_record["perplexity"], pruned_record["perplexity"]
    assert dense["protocol"] == "documents" and dense["documents"] == 40
    assert 3.4 < dense["perplexity"] < 4.0
    assert 80 < pruned["perplexity"] < 150


def test_kl_to_the_dense_model_agrees_with_a_naive_loop(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two texts, each by its protocol, in one call."""
    texts = [str(tmp_path / "records.jsonl"), str(tmp_path / "joined.txt")]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    (tmp_path / "joined.txt").write_text("\n\n".join(DOCUMENTS))
    command = ["evaluate", stories, "--one_shot", "2:4", "--dense", stories, "--text", *texts, "--seq_length", "16"]
    assert main([*command, "--json", str(tmp_path / "result.json")]) == 0
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["dense"] == stories and written["perplexity"] == written["texts"][0]

    # Score the same passages one at a time, in fp64.
    dense, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    pruned = AutoModelForCausalLM.from_pretrained(stories)
    prune_by_magnitude(pruned, NM(2, 4))
    documents = [[1, *tokenizer(text, add_special_tokens=False)["input_ids"]][:16] for text in DOCUMENTS]
    joined = tokenizer("\n\n".join(DOCUMENTS))["input_ids"]
    for score, passages in zip(
        written["texts"], (documents, [joined[i : i + 16] for i in range(0, len(joined) - 15, 16)]), strict=True
    ):
        kl, nll, count = 0.0, 0.0, 0
        for ids in passages:
            with torch.no_grad():
                p_SV, q_SV = (
                    torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)
                    for model in (dense, pruned)
                )
            kl += float((p_SV.exp() * (p_SV - q_SV)).sum())
            nll += naive_nll(dense, ids)[0]
            count += len(ids) - 1
        assert score["tokens"] == count and score["kl"] == pytest.approx(kl / count, rel=1e-4)
        assert score["dense_perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    # What is printed has these numbers.
    shown = capsys.readouterr().out
    first = written["texts"][0]
    assert f"KL to dense {first['kl']:.5f} nats a token" in shown
    assert f"| {texts[0]} | {first['perplexity']:.4f} | {first['dense_perplexity']:.4f} | {first['kl']:.5f} |" in shown


def test_max_tokens_takes_the_first_of_a_text(stories: str) -> None:
    model_and_text = (load_model(stories), load_tokenizer(stories))
    for protocol, length in (("documents", None), ("windows", 8)):
        lengths = [measure(*model_and_text, DOCUMENTS[:n], Scoring(protocol, length)).tokens for n in (1, 2)]  # type: ignore[arg-type]
        for most, documents in ((1, 1), (lengths[0], 1), (lengths[1], 2), (lengths[1] + 1, 2)):
            score = measure(*model_and_text, DOCUMENTS, Scoring(protocol, length, max_tokens=most))  # type: ignore[arg-type]
            if protocol == "documents":
                alone = measure(*model_and_text, DOCUMENTS[:documents], Scoring("documents"))
                assert (score.tokens, score.nll) == (alone.tokens, alone.nll)
            else:  # windows of 8 score 7
                assert score.tokens == max(7, most // 7 * 7)


def test_a_model_is_0_from_itself_at_any_number_of_rows_of_a_block(
    stories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_and_text = (load_model(stories, "bfloat16"), load_tokenizer(stories), DOCUMENTS, Scoring("documents"))
    score = measure(*model_and_text, dense=load_model(stories, "bfloat16"))
    assert score.kl == 0 and score.dense_perplexity == score.perplexity
    against_fp32 = measure(*model_and_text, dense=load_model(stories, "float32"))
    monkeypatch.setattr(perplexity, "BLOCK", 512 * 7)
    assert measure(*model_and_text, dense=load_model(stories, "float32")) == against_fp32 and 0 < against_fp32.kl < 1e-3


def test_a_dense_model_of_other_tokens_is_refused(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_model(tmp_path / "other", tiny_llama(vocab_size=BYTE_VOCABULARY))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": DOCUMENTS[0]}) + "\n")
    command = ["evaluate", stories, "--dense", str(other), "--text", str(tmp_path / "text.jsonl")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert f"--dense {other}: its tokenizer makes other tokens of the text than that of {stories}" in error
    padded = write_model(tmp_path / "padded", tiny_llama(vocab_size=BYTE_VOCABULARY + 8))
    assert main(["evaluate", str(other), "--dense", str(padded), "--text", str(tmp_path / "text.jsonl")]) == 2
    error = capsys.readouterr().err
    assert f"the dense model's head has {BYTE_VOCABULARY + 8} entries and the model's {BYTE_VOCABULARY}" in error


def test_a_family_without_rows_is_pruned_by_one_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny(BloomConfig, n_layer=2, n_head=4, vocab_size=BYTE_VOCABULARY)()
    bloom = write_model(tmp_path / "bloom", model)
    text = write_text(tmp_path / "text.jsonl")
    command = ["evaluate", str(bloom), "--text", str(text), "--any_family"]
    assert main(command) == 2 and "it says what --one_shot prunes" in capsys.readouterr().err
    assert main([*command, "--one_shot", "2:4"]) == 0


def test_output_ends_with_json(stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("\n".join(DOCUMENTS))
    assert main(["evaluate", stories, "--text", str(tmp_path / "text.txt"), "--seq_length", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])["perplexity"]
    assert result["protocol"] == "windows" and result["seq_length"] == 16
    assert f"perplexity {result['perplexity']:.4f}" in "\n".join(lines)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("pattern", [NM(2, 4), NM(1, 8), Block(16, 0.5)])
def test_pruning_by_magnitude_keeps_the_largest(build: object, pattern: NM | Block) -> None:
    assert callable(build)
    dense, model = build(), build()
    assert prune_by_magnitude(model, pattern) == (14 if build is tiny_llama else 8)
    changed = 0
    for (name, before), after in zip(dense.named_parameters(), model.parameters(), strict=True):
        if torch.equal(before, after):
            continue
        changed += 1
        axis = -2 if build is tiny_gpt2 else -1
        before_GM = pattern.to_groups(before.detach().flatten(), tuple(before.shape), axis)
        after_GM = pattern.to_groups(after.detach().flatten(), tuple(after.shape), axis)
        assert bool(((after_GM != 0).sum(1) == pattern.kept_count).all()), name
        kept = (after_GM != 0).to(before_GM.dtype)
        assert torch.equal(after_GM, before_GM * kept)
        smallest_kept = before_GM.abs().masked_fill(after_GM == 0, math.inf).amin(1)
        assert bool((smallest_kept >= (before_GM.abs() * (1 - kept)).amax(1)).all())
    assert changed == (14 if build is tiny_llama else 8)


def test_wrong_flags_are_refused(stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # One sound text, and texts that are each wrong in one way.
    (tmp_path / "good.jsonl").write_text('{"text": "a cat"}\n')
    (tmp_path / "field.jsonl").write_text('{"content": "a cat"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "a cat"}\n{"text": \n')
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "other.jsonl").write_text('{"a": "b"}\n')
    (tmp_path / "other.xml").write_text("<text/>")
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    good = str(tmp_path / "good.jsonl")
    shutil.copytree(stories, tmp_path / "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    cases = {
        (str(tmp_path / "none"), "--text", good): "none: no such folder",
        (str(tmp_path / "no_tokenizer"), "--text", good): "no_tokenizer: its tokenizer cannot be read (none of",
        (stories, "--text", str(tmp_path / "none.txt")): "none.txt: no such file; give a file of .txt, .jsonl",
        (stories, "--text", str(tmp_path / "other.jsonl")): "other.jsonl, line 1: no field 'text'",
        (stories, "--text", str(tmp_path / "other.xml")): "give a file of .txt, .jsonl",
        (stories, "--text", str(tmp_path / "chat.jsonl")): "chat.jsonl, record 1: a conversation or token ids; name",
        (stories, "--text", str(tmp_path / "empty.txt")): "there is no text",
        (stories, "--text", str(tmp_path / "field.jsonl")): "field.jsonl, line 1: no field 'text'",
        (stories, "--text", str(tmp_path / "broken.jsonl")): "line 2: not JSON",
        (stories, "--text", good, "--seq_length", "513"): "the model has 512 positions",
        (stories, "--text", good, "--protocol", "windows"): "less than one window",
        (stories, "--text", good, "--stride", "4"): "--stride belongs to --protocol windows",
        (
            stories,
            "--text",
            good,
            "--protocol",
            "windows",
            "--seq_length",
            "8",
            "--stride",
            "0",
        ): "--stride 0: use an integer >= 1",
        (stories, "--text", good, "--one_shot", "4:2"): "needs 0 < n < m",
        (stories, "--text", good, "--one_shot", "5:7"): "not a multiple of 7",
        (stories, "--text", good, "--limit", "0"): "--limit 0",
        (stories, "--text", good, "--json", str(tmp_path / "no" / "folder.json")): "cannot be written",
    }
    # Each is one line, before a model is scored.
    for command, message in cases.items():
        assert main(["evaluate", *command]) == 2, command
        error = capsys.readouterr().err
        assert message in error and error.count("error: ") == 1, (command, error)


@pytest.mark.parametrize("protocol", ["documents", "windows"])
def test_half_of_a_surrogate_pair_is_scored_as_training_reads_it(
    protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(Path(__file__).parents[3] / "sparseforge_ds" / "assets" / "stdlib_llama")
    losses = []
    for half in ("\\ud83d", "\\ufffd"):
        path = tmp_path / "text.jsonl"
        path.write_text('{"text": "hello ' + half + ' world, a b c"}\n')
        assert main(["evaluate", model, "--text", str(path), "--protocol", protocol, "--seq_length", "8"]) == 0
        losses.append(json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"]["nll"])
    assert losses[0] == losses[1]


def test_a_config_may_name_no_positions() -> None:
    assert (
        max_positions(BloomConfig()) == LONGEST_DEFAULT and max_positions(LlamaConfig(max_position_embeddings=9)) == 9
    )


def test_a_loss_that_is_not_finite_names_the_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss of the dense model is named as its own."""
    (tmp_path / "text.txt").write_text("\n".join(DOCUMENTS))
    sound = write_model(tmp_path / "sound")
    broken = write_model(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    text = ["--text", str(tmp_path / "text.txt"), "--seq_length", "16"]
    tensors[name][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    for models in ([str(broken)], [str(sound), "--dense", str(broken)]):
        assert main(["evaluate", *models, *text]) == 2
        expected = f"error: {broken}: the loss is nan: {name} is not finite; give a sound model"
        assert capsys.readouterr().err.splitlines()[-1] == expected


def test_an_infinite_divergence_is_the_fault_of_the_model_that_excludes_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("\n".join(DOCUMENTS))
    sound = write_model(tmp_path / "sound")
    excluding = write_model(tmp_path / "excluding")
    forward = LlamaForCausalLM.forward

    def without_the_last_entry(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if self.name_or_path == str(excluding):  # no text has this token
            output.logits[..., -1] = float("-inf")
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", without_the_last_entry)
    text = ["--text", str(tmp_path / "text.txt"), "--seq_length", "16"]
    assert main(["evaluate", str(excluding), "--dense", str(sound), *text]) == 2
    assert f"error: {excluding}: the KL divergence is inf: " in capsys.readouterr().err


def test_every_text_is_cut_before_a_model_is_loaded(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the error about the second text comes after hours of scoring the first one."""
    monkeypatch.setattr(finished_model, "load_model", lambda *_: pytest.fail("a model was loaded"))
    (tmp_path / "short.txt").write_text("Once.")
    assert main(["evaluate", str(stories), "--text", "stdlib:heldout", str(tmp_path / "short.txt")]) == 2
    assert "short.txt: the text has 3 tokens, less than one window of 512" in capsys.readouterr().err


def test_rows_of_wikitext_may_be_null_and_a_damaged_file_is_one_line(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n')
    assert read_text(f"wikitext2:{rows}", "text", None) == ["a\n\n\n\nb"]
    rows.write_text('{"text": "a"}\n{"text": \n')
    assert main(["evaluate", str(stories), "--text", f"wikitext2:{rows}"]) == 2
    assert f"--text wikitext2:{rows}: cannot be read (" in capsys.readouterr().err


def test_entries_that_both_models_rule_out_add_nothing_to_kl() -> None:
    """Rule entries out by logits of -inf, as models do with the padding of a vocabulary."""
    logits, dense = torch.randn(2, 3, 8)
    target = torch.tensor([0, 3, 5])
    expected = perplexity.score_tokens(logits[:, :6], target, dense[:, :6])
    logits[:, 6:] = dense[:, 6:] = -torch.inf
    torch.testing.assert_close(perplexity.score_tokens(logits, target, dense), expected)
    logits[:, 5] = -torch.inf
    assert perplexity.score_tokens(logits, target, dense)[0, 1] == torch.inf
