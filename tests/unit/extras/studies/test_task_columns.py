"""Tasks of the harness as columns of a comparison: measured, written to rows, and laid out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparseforge_ds.evaluate.finished_model import prune_by_magnitude
from sparseforge_ds.extras.studies import task_columns
from sparseforge_ds.extras.studies.assessment import Evaluator
from sparseforge_ds.extras.studies.records import Records, write_rows
from sparseforge_ds.extras.studies.settings import read_comparison
from sparseforge_ds.extras.studies.summary import markdown, summarize
from sparseforge_ds.extras.studies.texts import Texts
from sparseforge_ds.mask.pattern import parse_pattern
from tests.task_files import write_generation_task
from tests.unit.extras.studies.test_settings import write


def test_answers_of_every_result_stand_beside_its_perplexity(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    stories = assets / "models" / "stories260K"
    if not stories.is_dir():
        pytest.skip(f"no model in {stories}")
    # The dense model has the first item right, and a pruned one has not.
    dense, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    prompt = tokenizer("Once upon a time", return_tensors="pt")
    ids = dense.generate(**prompt, do_sample=False, max_new_tokens=14)[0, prompt["input_ids"].shape[1] :]
    ending = tokenizer.decode(ids).split(".")[0]
    write_generation_task(
        tmp_path, [{"opening": "Once upon a time", "ending": ending}, {"opening": "Mom", "ending": "x"}]
    )
    prune_by_magnitude(dense, parse_pattern("2:4"))
    dense.save_pretrained(tmp_path / "pruned")
    tokenizer.save_pretrained(tmp_path / "pruned")

    tasks = {"names": ["openings"], "include_path": ".", "limit": 2}
    config = read_comparison(write(tmp_path, model=str(stories), tasks=tasks, one_shot={}, methods={"ours": {}}))
    texts = Texts(["A dog."], ["A cat sat."], {}, [])
    for wrong, message in (
        ({"apply_chat_template": True}, "--apply_chat_template: the tokenizer of .* has no chat template"),
        ({"gen_kwargs": "long=1"}, "--gen_kwargs long: generation has no such setting"),
        ({"gen_kwargs": "max_gen_toks=100000"}, "--tasks openings: its answers have up to 100000 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            Evaluator(replace(config, tasks=replace(config.tasks, **wrong)), texts, config.pruned)
    # A perplexity would stand in a column of accuracies.
    rolling = {"task": "rolling", "output_type": "loglikelihood_rolling", "dataset_path": "json"}
    rolling |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rolling.jsonl")}}, "test_split": "test"}
    rolling |= {"doc_to_text": "", "doc_to_target": "text", "metric_list": [{"metric": "word_perplexity"}]}
    (tmp_path / "rolling.yaml").write_text(json.dumps(rolling))
    (tmp_path / "rolling.jsonl").write_text('{"text": "A dog."}\n')
    with pytest.raises(ValueError, match='"tasks" of the comparison: rolling measures perplexity'):
        Evaluator(replace(config, tasks=replace(config.tasks, names=("rolling",))), texts, config.pruned)
    evaluator = Evaluator(config, texts, config.pruned)
    assert evaluator.conditions["tasks"]["names"] == ("openings",)
    assert evaluator.conditions["tasks"]["include_path"] == str(tmp_path)
    # Other rows are another measurement; those behind the limit are not read.
    rows = [{"opening": "Once upon a time", "ending": ending}, {"opening": "Mom", "ending": "x"}]
    write_generation_task(tmp_path, [*rows, {"opening": "Dad", "ending": "y"}])
    assert Evaluator(config, texts, config.pruned).task_rows == evaluator.task_rows
    write_generation_task(tmp_path, [rows[0], {"opening": "Mom", "ending": "y"}])
    assert Evaluator(config, texts, config.pruned).task_rows != evaluator.task_rows
    # So are other settings of the task.
    write_generation_task(tmp_path, rows)
    file = tmp_path / "openings.yaml"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "description": "Tell on."}))
    assert Evaluator(config, texts, config.pruned).task_rows != evaluator.task_rows
    file.write_text(json.dumps(content))
    # The harness sets a tokenizer's padding, which other threads, that score texts, would set back.
    tokenizers = []
    wrap = task_columns.wrap_model
    monkeypatch.setattr(task_columns, "wrap_model", lambda *args: tokenizers.append(args[1]) or wrap(*args))
    baselines = evaluator.baselines({})
    assert tokenizers and evaluator.tokenizer not in tokenizers
    assert baselines["dense_task_openings_accuracy"] == 0.5 and baselines["dense_task_openings_lost"] == 0
    measured = evaluator.measure(tmp_path / "pruned", "test")
    assert measured["task_openings_accuracy"] == 0 and measured["task_openings_lost"] == 0.5
    assert 0 < measured["task_openings_answer_tokens"] <= 14 and 0 <= measured["task_openings_cut_at_limit"] <= 1
    assert not any(key.startswith("task_") for key in evaluator.measure(tmp_path / "pruned", "validation"))

    rows = write_rows(tmp_path, config, baselines, Records(tmp_path / "records"), {})
    result = {**rows[1], "kind": "result", "method": "ours", "seed": 3, "steps": 40, "learning_rate": 1e-3, **measured}
    table = markdown(summarize([*rows, result], "ours"), [*rows, result], config, [])
    assert "| openings | openings lost | openings tokens | openings cut |" in table
    tokens = f"{measured['task_openings_answer_tokens']:.4g}"
    assert any(line.startswith("| ours |") and f"| 0 | 0.5 | {tokens} |" in line for line in table.splitlines()), table
    assert "items that the dense model alone has right (lost)" in table
