from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparseforge_ds.evaluate.zero_shot import find_data, main

ROWS = [
    {"goal": "The dog was happy and", "sol1": "ran to the park", "sol2": "zzz qqq xxx", "label": 0},
    {"goal": "Once upon a time there", "sol1": "green of idea pod", "sol2": "was a little girl", "label": 1},
    {"goal": "The cat sat on the", "sol1": "mat", "sol2": "xylophone quartz", "label": 1},
]


def test_piqa_against_likelihoods_by_hand(assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    folder = assets / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no model in {folder}")
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main([str(folder), "--tasks", "piqa", "--data", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]["piqa"]

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


def test_find_data(tmp_path: Path) -> None:
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "a.arrow").touch()
    (tmp_path / "piqa" / "info.json").touch()
    (tmp_path / "boolq.jsonl").touch()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.arrow").touch()
    (tmp_path / "mixed" / "a.jsonl").touch()
    assert find_data(["piqa"], []) == {}
    assert find_data(["piqa", "boolq"], [str(tmp_path)]) == {
        "piqa": [tmp_path / "piqa" / "a.arrow"],
        "boolq": [tmp_path / "boolq.jsonl"],
    }
    assert find_data(["rte"], [f"rte={tmp_path / 'boolq.jsonl'}"]) == {"rte": [tmp_path / "boolq.jsonl"]}
    with pytest.raises(ValueError, match="no data of rte; looked for"):
        find_data(["piqa", "rte"], [str(tmp_path)])
    with pytest.raises(ValueError, match="give files of one kind"):
        find_data(["piqa"], [f"piqa={tmp_path / 'mixed'}"])
    with pytest.raises(ValueError, match="boolq is not in --tasks piqa"):
        find_data(["piqa"], ["boolq=x"])
