from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils import collect_env
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate import finished_model, harness, task_scores
from sparseforge_ds.evaluate.answers import Answer, AnswerLog
from sparseforge_ds.evaluate.paper_accuracies import SUITES
from sparseforge_ds.mask.pattern import parse_pattern
from tests.task_files import GENERATION_LIMIT as LIMIT
from tests.task_files import STOPS, write_generation_task, write_task
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
    # One call scores a text and a task, and loads the model once.
    loaded = []
    load = finished_model.load_model
    monkeypatch.setattr(finished_model, "load_model", lambda *settings: (loaded.append(settings), load(*settings))[1])
    flags = [*text, "--tasks", " piqa, piqa", "--include_path", str(tmp_path), "--json", str(tmp_path / "both.json")]
    assert main(["evaluate", str(folder), *flags]) == 0
    written = json.loads((tmp_path / "both.json").read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == written and len(loaded) == 1
    result = written["zero_shot"]["tasks"]["piqa"]
    # The text's score is that of a call without a task.
    assert main(["evaluate", str(folder), *text]) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])["perplexity"]
    assert {**written["perplexity"], "seconds": 0} == {**alone, "seconds": 0} and alone["documents"] == 4

    # The same choice by hand: the solution whose tokens are likelier together.
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
    """Run all nine benchmarks, HellaSwag as it was prepared, and RACE by hand and by a task file."""
    pytest.importorskip("lm_eval")
    folder = assets / "models" / "stories260K"
    benchmarks = assets / "benchmarks"
    if not folder.is_dir() or not benchmarks.is_dir():
        pytest.skip(f"no model and benchmarks in {assets}")
    # The benchmarks of the assets, and RACE, which is written here.
    for data in filter(Path.is_dir, benchmarks.iterdir()):
        (tmp_path / data.name).symlink_to(data)
    Dataset.from_list([RACE] * 4).to_json(tmp_path / "race.jsonl")
    write_task(tmp_path, "race", tmp_path / "race.jsonl")
    report = tmp_path / "report.json"
    command = [str(folder), "--suite", "paper", "--include_path", str(tmp_path), "--limit", "4"]
    command += ["--dense", str(folder), "--paper", "llama2-7b", "--one_shot", "2:4"]
    assert main(["evaluate", *command, "--json", str(report)]) == 0
    # Dense and sparse model have scores of all tasks, and differ on some items.
    result = json.loads(report.read_text())["zero_shot"]
    assert set(result["tasks"]) == set(result["dense"]["tasks"]) == set(SUITES["paper"])
    assert all(metrics["items"] == 4 and "acc_stderr" in metrics for metrics in result["tasks"].values())
    assert result["tasks"] != result["dense"]["tasks"]
    same = [metrics["same_as_dense"] for metrics in result["tasks"].values()]
    assert all(share in (0, 0.25, 0.5, 0.75, 1) for share in same) and 0 < sum(same) < len(same)
    # A suite's mean is over its seven tasks.
    for suite, mean in result["means"].items():
        assert mean == pytest.approx(sum(result["tasks"][task]["acc"] for task in SUITES[suite]) / 7)
    # The table has both models, what the mask changed, and the paper's row.
    shown = capsys.readouterr().out
    compared = "this: same_as_dense | this: acc_lost | this: acc_gained"
    assert f"this: acc | this: acc_norm | dense: acc | dense: acc_norm | {compared} | paper" in shown
    for metrics in result["tasks"].values():  # an item that both answer the same is no flip
        flips = metrics["acc_lost"] + metrics["acc_gained"]
        assert flips <= 1 - metrics["same_as_dense"] + 1e-9
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
    stories: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.setattr(finished_model, "load_model", lambda *_: pytest.fail("a model was loaded"))
    assert main(["evaluate", str(stories), "--tasks", "piqa", *flags]) == 2
    assert message in capsys.readouterr().err


OPENINGS = ["Once upon a time", "The dog was", "Lily and Tom", "One day a bird", "Mom said", "The big red"]


def alone(model: Any, tokenizer: Any, prompt: str) -> tuple[list[int], list[int], bool]:
    """Generate greedily, one token at a time; the answer ends with a stop sequence, the end of text or the limit."""
    start = tokenizer(prompt)["input_ids"]
    ids: list[int] = []
    while len(ids) < LIMIT:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([[*start, *ids]])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id or any(stop in tokenizer.decode(ids) for stop in STOPS):
            return start, ids, False
    return start, ids, True


def test_generated_answers_agree_with_generation_by_hand(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accuracy, lengths, cuts, flips and KL; prompts of different lengths share batches."""
    pytest.importorskip("lm_eval")
    dense, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    sparse = AutoModelForCausalLM.from_pretrained(stories)
    finished_model.prune_by_magnitude(sparse, parse_pattern("2:4"))
    answers = {
        name: [alone(model, tokenizer, opening) for opening in OPENINGS]
        for name, model in (("dense", dense), ("this", sparse))
    }
    texts = {name: [tokenizer.decode(ids).split(".")[0] for _, ids, _ in made] for name, made in answers.items()}
    # Targets: dense answers of the first half, sparse ones of the rest.
    targets = texts["dense"][:4] + texts["this"][4:]
    write_generation_task(
        tmp_path, [{"opening": opening, "ending": ending} for opening, ending in zip(OPENINGS, targets, strict=True)]
    )
    report = tmp_path / "report.json"
    command = ["evaluate", str(stories), "--one_shot", "2:4", "--dense", str(stories), "--tasks", "openings"]
    command += ["--include_path", str(tmp_path), "--batch_size", "4", "--dtype", "float32", "--json", str(report)]
    assert main(command) == 0
    written = json.loads(report.read_text())
    assert "zero_shot" not in written
    result = {
        "this": written["generation"]["tasks"]["openings"],
        "dense": written["generation"]["dense"]["tasks"]["openings"],
    }
    right = {name: [text == target for text, target in zip(made, targets, strict=True)] for name, made in texts.items()}
    cuts = set()
    for name, made in answers.items():
        assert result[name]["answer_tokens"] == pytest.approx(sum(len(ids) for _, ids, _ in made) / 6), name
        assert result[name]["cut_at_limit"] == pytest.approx(sum(cut for _, _, cut in made) / 6), name
        assert result[name]["exact_match"] == pytest.approx(sum(right[name]) / 6), name
        cuts |= {cut for _, _, cut in made}
    assert cuts == {True, False} and len({len(start) for start, _, _ in answers["dense"]}) > 1
    pairs = list(zip(right["this"], right["dense"], strict=True))
    assert pairs.count((False, True))
    assert result["this"]["exact_match_lost"] == pytest.approx(pairs.count((False, True)) / 6)
    assert pairs.count((True, False))
    assert result["this"]["exact_match_gained"] == pytest.approx(pairs.count((True, False)) / 6)
    # KL along the dense model's answers.
    divergences = []
    for start, ids, _ in answers["dense"]:
        with torch.no_grad():
            log_p, log_q = (
                torch.log_softmax(model(torch.tensor([[*start, *ids]])).logits[0, len(start) - 1 : -1], -1)
                for model in (dense, sparse)
            )
        divergences += (log_p.exp() * (log_p - log_q)).sum(-1).tolist()
    assert result["this"]["kl"] == pytest.approx(sum(divergences) / len(divergences), rel=1e-3)
    shown = capsys.readouterr().out
    assert "| task, metric | items | this | dense | dense alone right | this alone right | this: tokens |" in shown


def test_gsm8k_offline_with_examples_of_its_train_split(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read the hub's layout by the harness' own task; the answers of five examples fit 32 tokens beside the limit."""
    pytest.importorskip("lm_eval")
    rows = [{"question": f"Tom has {n} cats. And {n} more?", "answer": f"{n}+{n}\n#### {2 * n}"} for n in range(1, 9)]
    data = tmp_path / "gsm8k" / "main"
    data.mkdir(parents=True)
    Dataset.from_list(rows[:3]).to_parquet(data / "test-00000-of-00001.parquet")
    report = tmp_path / "report.json"
    command = ["evaluate", str(stories), "--include_path", str(tmp_path), "--json", str(report)]
    assert main([*command, "--tasks", "gsm8k"]) == 2
    assert "gsm8k/main that is, or is in a folder, named train" in capsys.readouterr().err
    Dataset.from_list(rows[3:]).to_parquet(data / "train-00000-of-00001.parquet")
    assert main([*command, "--tasks", "gsm8k"]) == 0
    assert main([*command, "--tasks", "gsm8k", "--num_fewshot", "0", "--gen_kwargs", "max_gen_toks=8"]) == 0
    metrics = json.loads(report.read_text())["generation"]["tasks"]["gsm8k"]
    assert metrics["items"] == 3 and metrics["answer_tokens"] <= 8
    assert {"exact_match,strict-match", "exact_match_stderr,flexible-extract"} <= metrics.keys()
    # What would fail after hours is said before a model is loaded.
    for flags, message in (
        (
            ["--tasks", "gsm8k", "--gen_kwargs", "max_gen_toks=512"],
            "--tasks gsm8k: its answers have up to 512 tokens, and",
        ),
        (["--tasks", "gsm8k", "--gen_kwargs", "long=1"], "--gen_kwargs long: generation has no such setting"),
        (["--tasks", "gsm8k", "--paper", "llama2-7b"], "--paper llama2-7b: the paper has no accuracies of generated"),
        (["--tasks", "gsm8k", "--apply_chat_template"], "--apply_chat_template: the tokenizer of"),
        (["--tasks", "humaneval"], "--tasks humaneval: runs the code that the model writes"),
        (["--tasks", "gsm8k", "--backend", "vllm"], "--backend vllm: vllm is not installed"),
        (["--tasks", "gsm8k", "--backend", "vllm", "--batch_size", "4"], "--batch_size 4: vLLM forms its own batches"),
        (["--tasks", "gsm8k", "--model_args", "seed=1"], "--model_args seed=1: they are vLLM's"),
    ):
        assert main([*command, *flags]) == 2, flags
        assert message in capsys.readouterr().err, flags


def test_a_limit_by_another_name_is_refused(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(finished_model, "load_model", lambda *_: pytest.fail("a model was loaded"))
    write_generation_task(tmp_path, [{"opening": "Once", "ending": "."}])
    command = ["evaluate", str(stories), "--include_path", str(tmp_path), "--tasks", "openings"]
    assert main([*command, "--gen_kwargs", "max_new_tokens=4096"]) == 2
    assert "--gen_kwargs max_new_tokens: write max_gen_toks, the harness' name" in capsys.readouterr().err
    assert main([*command, "--gen_kwargs", "max_gen_toks=512"]) == 2
    words = f"up to 512 tokens, and prompt and answer share the 512 positions of {stories}"
    assert words in capsys.readouterr().err
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    write_task(tmp_path, "piqa", tmp_path / "piqa.jsonl")
    chosen = ["evaluate", str(stories), "--include_path", str(tmp_path), "--tasks", "piqa", "--num_fewshot", "5"]
    assert main(chosen) == 2
    assert "--num_fewshot 5: none of these tasks has generated answers; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("max_gen_toks=9,temprature=0.6", "temprature: generation has no such setting; did you mean temperature?"),
        ("temperature=abc", "temperature: could not convert string to float: 'abc'"),
        ("temperature=2,do_sample=true", "temperature: `temperature` (=2) has to be a strictly positive float"),
        ("temperature=0.6", "temperature: `do_sample` is not set to `True`"),
        ("do_sample=maybe", "do_sample: do_sample is 'maybe'; use true or false"),
        ("num_beams=x", "num_beams: '>' not supported between"),
        ("cache_implementation=no", "cache_implementation: Invalid `cache_implementation` (no)"),
        ("pad_token_id=3", "pad_token_id: the harness sets it itself; leave it out"),
        ("until=5", "until: 5 is no text that ends an answer"),
    ],
)
def test_settings_of_generation_are_tried_first(
    stories: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    settings: str,
    message: str,
) -> None:
    """They would fail, or be ignored, after hours of texts and other tasks."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(finished_model, "load_model", lambda *_: pytest.fail("a model was loaded"))
    write_generation_task(tmp_path, [{"opening": "Once", "ending": "."}])
    command = ["evaluate", str(stories), "--include_path", str(tmp_path), "--tasks", "openings"]
    assert main([*command, "--text", "stdlib:heldout", "--gen_kwargs", settings]) == 2
    assert f"error: --gen_kwargs {message}" in capsys.readouterr().err


def test_a_setting_that_those_of_the_task_exclude_is_named(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take gsm8k's own settings, beside which do_sample alone makes a temperature of 0."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(finished_model, "load_model", lambda *_: pytest.fail("a model was loaded"))
    own = {"until": ["."], "do_sample": False, "temperature": 0.0, "max_gen_toks": 16}
    write_generation_task(tmp_path, [{"opening": "Once", "ending": "."}], generation_kwargs=own)
    command = ["evaluate", str(stories), "--include_path", str(tmp_path), "--tasks", "openings"]
    assert main([*command, "--gen_kwargs", "do_sample=true"]) == 2
    assert "error: --gen_kwargs do_sample: `temperature` (=0.0) has to be" in capsys.readouterr().err


def test_good_settings_of_generation_are_taken(stories: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    write_generation_task(tmp_path, [{"opening": "Once", "ending": "."}])
    command = ["evaluate", str(stories), "--include_path", str(tmp_path), "--tasks", "openings"]
    sampling = "do_sample=true,temperature=0.6,top_p=0.9,top_k=20"
    for settings in (sampling, "num_beams=2,until=x", "temperature=0", "forced_eos_token_id=300"):
        assert main([*command, "--gen_kwargs", settings]) == 0


def test_answers_that_a_filter_cannot_parse_are_not_the_same(stories: str, tmp_path: Path) -> None:
    """It makes "[invalid]" of each; an item counts once, whatever filters read its answer."""
    pytest.importorskip("lm_eval")
    filters = [
        {"name": name, "filter": [{"function": "regex", "regex_pattern": regex}, {"function": "take_first"}]}
        for name, regex in (("strict", "#### (-?[0-9]+)"), ("first", "(.)"))
    ]
    rows = [{"opening": opening, "ending": "."} for opening in OPENINGS]
    write_generation_task(tmp_path, rows, filter_list=filters)
    command = ["evaluate", str(stories), "--one_shot", "2:4", "--dense", str(stories), "--tasks", "openings"]
    report = tmp_path / "report.json"
    assert main([*command, "--include_path", str(tmp_path), "--dtype", "float32", "--json", str(report)]) == 0
    dense, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
    sparse = AutoModelForCausalLM.from_pretrained(stories)
    finished_model.prune_by_magnitude(sparse, parse_pattern("2:4"))
    texts = [
        [tokenizer.decode(alone(model, tokenizer, opening)[1]).split(".")[0] for opening in OPENINGS]
        for model in (dense, sparse)
    ]
    same = sum(first == second for first, second in zip(*texts, strict=True))
    assert same < len(OPENINGS)
    metrics = json.loads(report.read_text())["generation"]["tasks"]["openings"]
    assert metrics["same_as_dense"] == pytest.approx(same / len(OPENINGS))


def test_the_harness_asks_no_program_for_versions_and_git_says_nothing_outside_of_a_checkout(
    stories: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "piqa.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    write_task(tmp_path, "piqa", tmp_path / "piqa.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(collect_env, "get_pretty_env_info", lambda: pytest.fail("it asks"))
    assert main(["evaluate", str(stories), "--include_path", str(tmp_path), "--tasks", "piqa"]) == 0
    assert "git repository" not in capfd.readouterr().err


def test_graded_values_of_one_model_are_not_compared() -> None:
    """Measure an F1 that is 0 everywhere, which looks like right and wrong, where the dense model's is graded."""
    scores = [
        task_scores.TaskScores(metrics={"qa": {}}, choices={"qa": {}}, is_right={"qa": right}, generated={})
        for right in ({"f1,none": {0: False}, "em,none": {0: False}}, {"em,none": {0: True}})
    ]
    task_scores.compare_answers(*scores)
    assert scores[0].metrics["qa"] == {"em_lost,none": 1.0, "em_gained,none": 0.0}


def test_a_task_that_includes_one_which_runs_code_runs_code(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("unsafe_code: true\n")
    (tmp_path / "more.yaml").write_text("include: base.yaml\ntask: more\n")
    assert harness.runs_code(tmp_path / "more.yaml")


def test_tasks_that_run_code_need_leave_and_are_tried_first(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    write_generation_task(tmp_path, [{"opening": "Once", "ending": "."}], unsafe_code=True)
    command = ["evaluate", str(stories), "--include_path", str(tmp_path), "--tasks", "openings"]
    plain = (tmp_path / "openings.yaml").read_text()
    (tmp_path / "run.py").write_text("def score(doc, results):\n    raise SystemExit('code of an answer has run')\n")
    (tmp_path / "openings.yaml").write_text(f"process_results: !function run.score\n{yaml_of(plain)}")
    assert main(command) == 2
    assert "--tasks openings: runs the code that the model writes, on this machine" in capsys.readouterr().err
    (tmp_path / "openings.yaml").write_text(plain)
    assert main([*command, "--confirm_run_unsafe_code"]) == 0
    # A package that scoring needs is asked for before an hour of generation.
    (tmp_path / "score.py").write_text("import no_such_package\n\ndef score(doc, results):\n    return {}\n")
    task = (tmp_path / "openings.yaml").read_text()
    (tmp_path / "openings.yaml").write_text(f"process_results: !function score.score\n{yaml_of(task)}")
    assert main([*command, "--confirm_run_unsafe_code"]) == 2
    assert "--tasks openings: No module named 'no_such_package'; install it" in capsys.readouterr().err


def yaml_of(text: str) -> str:
    """Return the keys of a JSON object as lines of YAML."""
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in json.loads(text).items())


def test_answers_belong_to_their_task_where_two_have_the_same_prompts(stories: str, tmp_path: Path) -> None:
    """One may give longer answers, another name its settings in another order; chrF has no formula for its error."""
    pytest.importorskip("lm_eval")
    write_generation_task(tmp_path, [{"opening": "Once upon", "ending": "."}, {"opening": "Lily and", "ending": "."}])
    task = json.loads((tmp_path / "openings.yaml").read_text())
    longer = {"until": ["no such text"], "max_gen_toks": 40, "do_sample": False}
    metric = {"metric": "chrf", "aggregation": "chrf", "higher_is_better": True}
    more = {**task, "task": "longer", "generation_kwargs": longer, "metric_list": [metric]}
    (tmp_path / "longer.yaml").write_text(json.dumps(more))
    swapped = dict(reversed(task["generation_kwargs"].items()))
    (tmp_path / "swapped.yaml").write_text(json.dumps({**task, "task": "swapped", "generation_kwargs": swapped}))
    command = ["evaluate", str(stories), "--include_path", str(tmp_path), "--tasks", "openings,longer,swapped"]
    assert main([*command, f"--json={tmp_path / 'report.json'}"]) == 0
    metrics = json.loads((tmp_path / "report.json").read_text())["generation"]["tasks"]
    assert metrics["openings"]["answer_tokens"] <= LIMIT < metrics["longer"]["answer_tokens"]
    assert metrics["openings"]["answer_tokens"] == metrics["swapped"]["answer_tokens"]
    assert metrics["longer"]["chrf_stderr"] >= 0


class _VLLM:
    """Stand-in for the harness' class for vLLM, with what `AnswerLog` needs."""

    def _model_generate(self, requests: list[list[int]], generate: bool = False) -> list[Any]:
        reasons = ("length", "stop")
        return [
            SimpleNamespace(
                prompt_token_ids=ids,
                outputs=[SimpleNamespace(token_ids=[7] * len(ids), finish_reason=reasons[len(ids) % 2])],
            )
            for ids in requests
        ]


def test_answers_of_vllm_are_counted_too() -> None:
    wrapped: Any = _VLLM()
    log = AnswerLog(wrapped)
    wrapped._model_generate([[1]])  # a likelihood
    wrapped._model_generate(requests=[[1, 2], [1, 2, 3]], generate=True)
    assert log.take() == [Answer([1, 2], [7, 7], True), Answer([1, 2, 3], [7] * 3, False)]
    assert log.take() == []


def test_what_is_measured_is_printed_where_the_dense_model_cannot_be_loaded(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    write_task(tmp_path, "piqa", tmp_path / "piqa.jsonl")
    load = finished_model.load_model
    loaded: list[str] = []

    def load_one(name: str, *settings: Any) -> Any:
        loaded.append(name)
        if len(loaded) == 2:
            raise ValueError("the dense model is gated")
        return load(name, *settings)

    monkeypatch.setattr(finished_model, "load_model", load_one)
    command = ["evaluate", str(stories), "--include_path", str(tmp_path), "--tasks", "piqa", "--dense", str(stories)]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert "the dense model is gated" in printed.err
    record = json.loads(printed.out.splitlines()[-1])["zero_shot"]
    assert record["tasks"]["piqa"]["items"] == len(ROWS) and record["num_fewshot"] == 0 and "dense" not in record


def test_answers_of_the_dense_model_are_printed_where_both_models_do_not_fit(
    stories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    write_generation_task(tmp_path, [{"opening": OPENINGS[0], "ending": "."}])

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    monkeypatch.setattr(task_scores, "compare_next_tokens", fail)
    command = ["evaluate", str(stories), "--include_path", str(tmp_path), "--tasks", "openings", "--limit", "1"]
    assert main([*command, "--dense", str(stories), "--batch_size", "1"]) == 2
    printed = capsys.readouterr()
    assert "CUDA out of memory; free the GPU's memory, or lower --batch_size" in printed.err
    record = json.loads(printed.out.splitlines()[-1])["generation"]
    assert record["dense"]["tasks"]["openings"]["items"] == record["tasks"]["openings"]["items"] == 1
