from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate import finished_model
from sparseforge_ds.evaluate.published import SUITES
from tests.task_files import write_task
from tests.tiny_folders import write_model
from tests.tiny_models import tiny_llama

ROWS = [
    {"goal": "The dog was happy and", "sol1": "ran to the park", "sol2": "zzz qqq xxx", "label": 0},
    {"goal": "Once upon a time there", "sol1": "green of idea pod", "sol2": "was a little girl", "label": 1},
    {"goal": "The cat sat on the", "sol1": "mat", "sol2": "xylophone quartz", "label": 1},
]


def test_piqa_agrees_with_likelihoods_by_hand(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    folder = assets / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no model in {folder}")
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    text = ["--text", "stdlib:heldout", "--seq_length", "64", "--limit", "4"]
    write_task(tmp_path, "piqa", tmp_path / "piqa.jsonl")
    loaded, load = [], finished_model.load_model
    monkeypatch.setattr(finished_model, "load_model", lambda *given: (loaded.append(given), load(*given))[1])
    both = [*text, "--tasks", " piqa, piqa", "--include_path", str(tmp_path), "--json", str(tmp_path / "both.json")]
    assert main(["evaluate", str(folder), *both]) == 0
    written = json.loads((tmp_path / "both.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == written and len(loaded) == 1
    result = written["zero_shot"]["tasks"]["piqa"]
    assert main(["evaluate", str(folder), *text]) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"]
    assert {**written["perplexity"], "seconds": 0} == {**alone, "seconds": 0} and alone["documents"] == 4

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right = 0
    for row in ROWS:
        scores = []
        for solution in (row["sol1"], row["sol2"]):
            context = f"Question: {row['goal']}\nAnswer:"
            start = len(tokenizer(context)["input_ids"])
            ids = tokenizer(f"{context} {solution}")["input_ids"]
            with torch.no_grad():
                log_probs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
            scores.append(sum(float(log_probs[i - 1, ids[i]]) for i in range(start, len(ids))))
        right += int(scores[1] > scores[0]) == row["label"]
    assert result["items"] == 3
    assert result["acc"] == pytest.approx(right / 3)
    share = right / 3
    assert result["acc_stderr"] == pytest.approx((share * (1 - share) / 2) ** 0.5)


def test_tokens_that_the_model_does_not_know_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    small = write_model(tmp_path / "small", tiny_llama(vocab_size=60))
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    write_task(tmp_path, "piqa", tmp_path / "piqa.jsonl")
    assert main(["evaluate", str(small), "--tasks", "piqa", "--include_path", str(tmp_path)]) == 2
    error = capsys.readouterr().err  # progress bars and all
    assert f"{small}: its tokenizer gives token 220, the model has 60 embeddings; tokenizer and weights" in error


RACE = {
    "article": "The cat sat. It was happy.",
    "problems": "[{'question': 'Who sat?', 'options': ['a cat', 'a dog', 'a fox', 'an owl'], 'answer': 'A'}]",
}


def test_the_suite_runs_offline_on_real_data(assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All nine: the benchmarks themselves, HellaSwag prepared already, and RACE by hand and by a task file."""
    pytest.importorskip("lm_eval")
    folder, benchmarks = assets / "models" / "stories260K", assets / "benchmarks"
    if not folder.is_dir() or not benchmarks.is_dir():
        pytest.skip(f"no model and benchmarks in {assets}")
    for data in filter(Path.is_dir, benchmarks.iterdir()):
        (tmp_path / data.name).symlink_to(data)
    Dataset.from_list([RACE] * 4).to_json(tmp_path / "race.jsonl")
    write_task(tmp_path, "race", tmp_path / "race.jsonl")
    report = tmp_path / "report.json"
    command = [str(folder), "--suite", "paper", "--include_path", str(tmp_path), "--limit", "4"]
    command += ["--dense", str(folder), "--paper", "llama2-7b", "--one_shot", "2:4"]
    assert main(["evaluate", *command, "--json", str(report)]) == 0
    result = json.loads(report.read_text())["zero_shot"]
    assert set(result["tasks"]) == set(result["dense"]["tasks"]) == set(SUITES["paper"])
    assert all(metrics["items"] == 4 and "acc_stderr" in metrics for metrics in result["tasks"].values())
    assert result["tasks"] != result["dense"]["tasks"]
    same = [metrics["same_as_dense"] for metrics in result["tasks"].values()]
    assert all(share in (0, 0.25, 0.5, 0.75, 1) for share in same) and 0 < sum(same) < len(same)
    for suite, mean in result["means"].items():
        assert mean == pytest.approx(sum(result["tasks"][task]["acc"] for task in SUITES[suite]) / 7)
    shown = capsys.readouterr().out
    assert "this: acc | this: acc_norm | dense: acc | dense: acc_norm | this: same_as_dense | paper" in shown
    assert shown.count("±") >= 2 * len(SUITES["paper"])
    assert "| 56.43 | 57.27 |" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit", "0"], "--limit 0: use an integer >= 1"),
        (["--json", "none/here.json"], "--json none/here.json: cannot be written, there is no folder none"),
        (["--dense", "/none/here"], "/none/here: no such folder"),
        (["--include_path", "none"], "--include_path none: no such folder"),
    ],
)
def test_what_is_wrong_is_said_before_the_evaluation(
    stories: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.setattr(finished_model, "load_model", lambda *_: pytest.fail("a model was loaded"))
    assert main(["evaluate", str(stories), "--tasks", "piqa", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def stories(assets: Path) -> Path:
    folder = assets / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no model in {folder}")
    return folder
