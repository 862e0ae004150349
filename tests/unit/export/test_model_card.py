"""Model cards: what an exported folder, its run and its scores say, as the hub reads it; and the upload."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard

from sparseforge_ds.checkpoint.tensors import hash_file
from sparseforge_ds.cli.main import main
from sparseforge_ds.export import model_card, upload
from sparseforge_ds.model.hub_access import public_name
from sparseforge_ds.packed_format.packing import PACKED24
from tests.tiny_folders import write_json

RUN = {
    "model": "owner/dense-1b",
    "teacher": None,
    "dataset": ["allenai/c4:en", "own.jsonl"],
    "seq_length": 64,
    "lr_scheduler_type": "warmup_stable_decay",
    "tokens": 640000,
    "evaluation": {"text": "held_out.jsonl", "loss": 2.0, "sequences": 8, "seq_length": 64},
}
RECORD = {
    "pattern": "2:4",
    "finished": True,
    "step": 400,
    "dtype": "bfloat16",
    "run": RUN,
    "config": {"method": {"name": "sparseforge"}, "importance": "fisher"},
    "weights": {"a.weight": {"input_axis": -1}},
    "dense": {},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write what a card reads of an export."""
    made = tmp_path / "made"
    made.mkdir()
    write_json(made / "sparsity.json", RECORD)
    write_json(made / "config.json", {"model_type": "llama"})
    return made


def test_a_card_has_the_settings_and_scores_of_the_run(folder: Path, tmp_path: Path) -> None:
    # Results as `evaluate` writes them: of texts, of tasks, and of generated answers.
    wikitext = {"text": "wikitext2", "perplexity": 12.5, "protocol": "windows", "seq_length": 4096, "limit": 5}
    perplexity = {
        "model": str(folder),
        "dtype": "bfloat16",
        "perplexity": wikitext,
        "texts": [wikitext, {"text": "c4.jsonl", "perplexity": 20.5, "kl": 0.25}],
    }
    zero_shot = {
        "model": str(folder),
        "zero_shot": {
            "tasks": {"arc_easy": {"acc": 0.5, "acc_norm": 0.45, "acc_stderr": 0.1}},
            "limit": 40,
            "num_fewshot": 0,
        },
    }
    strict = {
        "exact_match,strict-match": 0.3,
        "exact_match_stderr,strict-match": 0.1,
        "exact_match_lost,strict-match": 0.2,
    }
    answers = {"answer_tokens": 90.5, "cut_at_limit": 0.25, "items": 40}
    generation = {"model": str(folder), "generation": {"tasks": {"gsm8k": strict | answers}, "limit": 40}}
    contents = (perplexity, zero_shot, generation)
    files = [str(write_json(tmp_path / f"{n}.json", content)) for n, content in enumerate(contents)]
    assert main(["card", str(folder), "--results", *files, "--license", "apache-2.0"]) == 0
    # The head of the card, which the hub reads.
    card = ModelCard.load(folder / "README.md")
    data = card.data
    assert (data.base_model, data.datasets, data.license) == ("owner/dense-1b", ["allenai/c4"], "apache-2.0")
    assert data.library_name == "transformers" and {"2:4", "sparse"} <= set(data.tags)
    # Every score once, with what it was measured on.
    scores = {(score.dataset_name, score.metric_name): score for score in data.eval_results}
    assert {key: score.metric_value for key, score in scores.items()} == {
        ("held_out.jsonl", "perplexity"): 7.389056,
        ("wikitext2", "perplexity"): 12.5,
        ("c4.jsonl", "perplexity"): 20.5,
        ("c4.jsonl", "KL to dense, nats a token"): 0.25,
        ("arc_easy", "acc"): 0.5,
        ("arc_easy", "acc_norm"): 0.45,
        ("gsm8k", "exact_match,strict-match"): 0.3,
        ("gsm8k", "answer_tokens"): 90.5,
        ("gsm8k", "cut_at_limit"): 0.25,
    }
    # The hub keeps one set of arguments for a config of a dataset, and none of two settings takes the other's.
    assert scores["arc_easy", "acc"].dataset_args == {"limit": 40, "num_fewshot": 0}
    assert scores["arc_easy", "acc"].dataset_config == "limit=40, num_fewshot=0"
    assert scores["wikitext2", "perplexity"].dataset_args == {
        "protocol": "windows",
        "seq_length": 4096,
        "limit": 5,
        "dtype": "bfloat16",
    }
    # The text, which people read: settings of the run.
    assert "| schedule of the rate | warmup_stable_decay |" in card.text
    for words in ("# dense-1b 2:4", "| steps | 400 |", "| tokens | 640,000 |", "`own.jsonl`", "7.38906 (sequences 8"):
        assert words in card.text, words


def test_the_base_model_of_a_folder_has_its_name_on_the_hub(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(folder / "sparsity.json", {**RECORD, "run": {"model": "smollm2"}})
    assert main(["card", str(folder)]) == 0
    assert ModelCard.load(folder / "README.md").data.base_model is None
    assert main(["card", str(folder), "--base_model", "owner/dense"]) == 0
    for again in range(2):  # and stays in a new card
        made = ModelCard.load(folder / "README.md")
        assert made.data.base_model == "owner/dense" and "of [owner/dense](https" in made.text, again
        assert main(["card", str(folder), "--license", "mit"]) == 0
    capsys.readouterr()
    assert main(["card", str(folder), "--base_model", "models/my dense"]) == 2
    assert "--base_model models/my dense: give owner/name" in capsys.readouterr().err


def test_scores_and_license_stay_in_a_new_card(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores and licence went with the upload that came after them."""

    def said() -> tuple[str | None, list[tuple[str, float]]]:
        data = ModelCard.load(folder / "README.md").data
        return data.license, [(score.dataset_name, score.metric_value) for score in data.eval_results]

    def result(value: float) -> str:
        scored = {"text": "wikitext2", "perplexity": value, "protocol": "windows"}
        return str(write_json(tmp_path / "result.json", {"model": str(folder), "perplexity": scored}))

    monkeypatch.setattr("sparseforge_ds.export.upload.push", lambda *_: "there")
    assert main(["card", str(folder), "--results", result(12.5), "--license", "apache-2.0"]) == 0
    of_run, added = ("held_out.jsonl", 7.389056), ("wikitext2", 12.5)
    for again in ((), ("--push", "owner/made"), ("--license", "mit")):
        assert main(["card", str(folder), *again]) == 0
        assert said() == ("mit" if "mit" in again else "apache-2.0", [of_run, added])
    assert main(["card", str(folder), "--results", result(11.5), result(11.5)]) == 0
    assert said() == ("mit", [of_run, ("wikitext2", 11.5)]), "new results in place of old ones"


def test_a_damaged_card_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["card", str(folder)]) == 0
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text.replace("library_name:", "library_name: [", 1))
    capsys.readouterr()
    assert main(["card", str(folder)]) == 2
    assert "README.md: its metadata is damaged (" in capsys.readouterr().err
    (folder / "README.md").write_text("---\nmodel-index:\n- name: x\n  results:\n  - task: {}\n---\n" + text)
    assert main(["card", str(folder)]) == 2
    assert "README.md: its metadata is damaged (" in capsys.readouterr().err


def test_a_score_that_no_float_holds_is_left_out_of_a_new_card(folder: Path, tmp_path: Path) -> None:
    scored = {"text": "wikitext2", "perplexity": 12.5}
    result = write_json(tmp_path / "result.json", {"model": str(folder), "perplexity": scored})
    assert main(["card", str(folder), "--results", str(result)]) == 0
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(card.replace("value: 12.5", f"value: {10**400}"))
    assert main(["card", str(folder)]) == 0
    assert "wikitext2" not in (folder / "README.md").read_text()


@pytest.mark.parametrize("epochs", [0, 4])
def test_a_rate_is_shown_where_something_was_trained(folder: Path, epochs: int) -> None:
    start = {"mask": "sparsegpt", "epochs": epochs, "rate": 0.02, "soft": 0.4}
    write_json(folder / "sparsity.json", {**RECORD, "source": {"start": start}})
    assert main(["card", str(folder)]) == 0
    assert ("| rate, relative to the weights | 0.02 |" in (folder / "README.md").read_text()) == bool(epochs)


def test_several_base_models_stay_in_a_new_card(folder: Path) -> None:
    assert main(["card", str(folder)]) == 0
    card = ModelCard.load(folder / "README.md")
    card.data.base_model = ["owner/dense-1b", "owner/other"]
    card.save(folder / "README.md")
    assert main(["card", str(folder), "--license", "mit"]) == 0
    assert ModelCard.load(folder / "README.md").data.base_model == ["owner/dense-1b", "owner/other"]
    assert main(["card", str(folder), "--base_model", "owner/new"]) == 0
    assert ModelCard.load(folder / "README.md").data.base_model == "owner/new"


HOSTILE = (
    "x\n# Free money\n<script>alert(1)</script> [click](http://evil.example) www.evil.example | `code` " + "y" * 999
)


def test_a_hostile_record_puts_nothing_into_the_card(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Write no HTML, link or line of the record's own, and no perplexity that no model has."""
    named = "owner/name:part](http://evil.example)<b>"
    run = {**dict.fromkeys(("model", "teacher", "seq_length", "global_batch", "learning_rate"), HOSTILE)}
    score = {"text": HOSTILE, "loss": 2.0, "sequences": 8}
    record = {**RECORD, "dtype": HOSTILE, "run": {**run, "dataset": [HOSTILE, named], "evaluation": score}}
    write_json(folder / "sparsity.json", {**record, "source": {}})
    assert main(["card", str(folder)]) == 0
    text = ModelCard.load(folder / "README.md").text
    outside = re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for odd in ("<script>", "<b>", "evil", "Free money", "click"):
        assert odd not in outside, odd
    assert "\n# Free" not in text and max(map(len, text.splitlines())) < 2000
    assert "7.38906 (sequences 8)" in text
    for loss in (float("nan"), float("inf"), -1.0, 700.0, 1e9, True, "low"):
        write_json(folder / "sparsity.json", {**RECORD, "run": {**RUN, "evaluation": {"text": "a", "loss": loss}}})
        (folder / "README.md").unlink()
        assert main(["card", str(folder)]) == 0
        assert ("perplexity" in (folder / "README.md").read_text()) == (loss is True)
    result = {"model": str(folder), "perplexity": {"text": "wikitext2", "perplexity": float("nan")}}
    assert main(["card", str(folder), "--results", str(write_json(folder / "r.json", result))]) == 2
    assert "damaged (ValueError('perplexity is nan')); measure again" in capsys.readouterr().err


def test_a_damaged_record_is_one_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = [
        *(("run", "dataset", odd) for odd in (5, [5], "c4", {"a": 1})),
        *(("run", "model", odd) for odd in (5, ["a"])),
        *((None, "step", odd) for odd in ("7", True, [7])),
        *((None, "pattern", odd) for odd in (None, "2:4 <b>", 24)),
    ]
    for section, key, odd in damaged:
        content = {**RECORD, key: odd} if section is None else {**RECORD, section: {**RUN, key: odd}}
        write_json(folder / "sparsity.json", content)
        assert main(["card", str(folder)]) == 2, (key, odd)
        message = capsys.readouterr().err
        assert message.startswith("error: ") and key in message and message.count("\n") == 1, message


def test_scores_of_another_model_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stood on the card as the model's own."""
    scored = {"perplexity": {"text": "wikitext2", "perplexity": 12.5}}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other" / "made").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)

    def card_of(*flags: str, **content: Any) -> str:
        result = write_json(tmp_path / "result.json", scored | {"one_shot": None, "adapter": None} | content)
        (folder / "README.md").unlink(missing_ok=True)
        code = main(["card", str(folder), "--results", str(result), *flags])
        stderr = capsys.readouterr().err
        assert (folder / "README.md").exists() == (code == 0) and code == 2 * bool(stderr)
        return stderr

    # this folder, by any path; before it was moved, or from elsewhere; or as what it is called on the hub
    for model in (str(folder), "made", "./made/", "link", "../gone/made", "/gone/made", "owner/made"):
        assert card_of(model=model) == "", model
    monkeypatch.setattr("sparseforge_ds.export.upload.push", lambda *_: "there")
    assert card_of("--push", "owner/sparse-1b", model="owner/sparse-1b") == ""
    for model in ("owner/sparse-1b", "owner/dense-1b", "other/made", "/gone/other", ".", None):
        message = (
            f"its scores are of {model}, and not of {folder}; give what sparseforge evaluate {folder} writes by --js"
        )
        assert message in card_of(model=model), model
    assert "and not of" in card_of("--push", "owner/sparse-1b", model="owner/dense-1b")
    assert "its scores are of made after --one_shot 2:4; give" in card_of(model="made", one_shot="2:4")
    assert "its scores are of made with another adapter, made; give" in card_of(model="made", adapter="made")
    # a dense model that is called as the folder is
    write_json(folder / "sparsity.json", RECORD | {"run": RUN | {"model": "owner/made"}})
    assert "its scores are of owner/made, and not of" in card_of(model="owner/made")
    write_json(folder / "adapter_config.json", {"r": 8})
    assert card_of(model="made", adapter="made") == card_of(model="made", adapter=str(folder)) == ""
    assert "made without the low-rank adapter that belongs to it; give" in card_of(model="made")
    assert "made with another adapter, other/made; give" in card_of(model="made", adapter="other/made")


def test_a_card_of_a_model_with_branches_says_what_loads_them(folder: Path) -> None:
    packed = {"quantization_config": {"quant_method": PACKED24, "low_rank": {"a": 4}}}
    write_json(folder / "config.json", {"model_type": "llama", **packed})
    text = str(model_card.make_card(folder, name="owner/name"))
    assert "## A model with low-rank branches" in text and "`sparseforge export owner/name OUT --format hf`" in text
    write_json(folder / "config.json", {"model_type": "llama"})
    write_json(folder / "adapter_config.json", {"r": 8, "rank_pattern": {"a": 16}})
    text = str(model_card.make_card(folder))
    assert "## A model in two parts" in text and "(rank 16)" in text and "import peft  # fails" in text


def test_a_card_of_somebody_else_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "README.md").write_text("my own words")
    assert main(["card", str(folder)]) == 0
    assert (folder / "README.md").read_text() == "my own words"
    assert "stays as it is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "published"),
    [("owner/name", "owner/name"), ("a/b:c/d", "a/b:c/d"), ("/home/me/secret/model", "model"), ("./model/", "model")],
)
def test_no_path_of_a_machine_is_published(name: str, published: str) -> None:
    assert public_name(name) == published


def test_files_that_are_no_export_or_no_result_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text('{"steps": 3}')
    scored = {"text": "wikitext2", "perplexity": 10**400}
    huge = write_json(tmp_path / "huge.json", {"model": str(folder), "perplexity": scored})
    (text := tmp_path / "a b.txt").write_text("no JSON")
    for arguments, message in (
        ([str(tmp_path)], "has no sparsity.json"),
        ([str(folder), "--results", str(tmp_path / "other.json")], "is no result of"),
        (
            [str(folder), "--results", "nothere.json"],
            "--results nothere.json: no such file; give what sparseforge eval",
        ),
        ([str(folder), "--results", str(text)], f"--results {text}: not a readable JSON file (Expecting value"),
        ([str(folder), "--results", str(text)], "; give what sparseforge evaluate writes by --json"),
        ([str(folder), "--results", str(huge)], f"--results {huge}: damaged (OverflowError("),
        ([str(folder), "--private"], "--private: it belongs to --push"),
        ([str(folder), "--push", "name"], "--push name: give owner/name"),
    ):
        assert main(["card", *arguments]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and not captured.out
    write_json(folder / "sparsity.json", {**RECORD, "run": ["a"]})
    assert main(["card", str(folder)]) == 2
    assert "run is damaged" in capsys.readouterr().err


@contextlib.contextmanager
def hub_that_takes(refuses: bool = False, has: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, bytes], list[str]]]:
    """Serve a hub of models: its address, the files that were committed, and the paths that were asked for."""
    files: dict[str, bytes] = {}
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing on the screen."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append(self.path)
            address = f"http://127.0.0.1:{self.server.server_address[1]}"
            if refuses:
                return self.answer(401, {"error": "who are you"})
            if self.path == "/api/repos/create":
                return self.answer(200, {"url": f"{address}/owner/made"})
            if "/preupload/" in self.path:
                named = [file["path"] for file in json.loads(body)["files"]]
                modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in named]
                return self.answer(200, {"files": modes})
            if "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "deletedFile":
                        files[line["value"]["path"]] = b""
                    if line["key"] == "file":
                        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                made = {"commitUrl": f"{address}/owner/made/commit/a", "commitOid": "a" * 40, "hookOutput": ""}
                return self.answer(200, made)
            return self.answer(200, {"errors": [], "warnings": []})  # of the check of a card's metadata

        def do_GET(self) -> None:
            asked.append(self.path)
            if "/tree/" in self.path:
                return self.answer(200, [{"type": "file", "path": name, "oid": "b" * 40, "size": 1} for name in has])
            self.answer(200, {"id": "owner/made", "sha": "a" * 40, "siblings": [{"rfilename": name} for name in has]})

        def answer(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    # It listens on a free port, in a thread of this process.
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", files, asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_folder_and_card_are_uploaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub_that_takes() as (address, files, asked):
        monkeypatch.setattr(upload.huggingface_hub, "HfApi", lambda: HfApi(endpoint=address, token="hf_none"))
        assert main(["card", str(folder), "--push", "owner/made"]) == 0
    assert f"uploaded: {address}/owner/made" in capsys.readouterr().out
    assert set(files) == {path.name for path in folder.iterdir()} == {"README.md", "config.json", "sparsity.json"}
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert 'from_pretrained("owner/made")' in files["README.md"].decode()
    assert asked[0] == "/api/repos/create" and asked[-1] == "/api/models/owner/made/commit/main"


def test_weights_and_adapters_of_an_earlier_upload_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json", "notes.txt")
    with hub_that_takes(has=earlier) as (address, files, _):
        monkeypatch.setattr(upload.huggingface_hub, "HfApi", lambda: HfApi(endpoint=address, token="hf_none"))
        upload.push(folder, "owner/made")
    assert {name for name, content in files.items() if not content} == set(earlier[:3])


def test_an_adapter_names_the_model_that_it_is_uploaded_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(folder / "adapter_config.json", {"r": 4, "base_model_name_or_path": None})
    record = json.loads((folder / "sparsity.json").read_text())
    write_json(folder / "sparsity.json", record | {"adapter_config_sha256": hash_file(folder / "adapter_config.json")})
    local = {path.name: path.read_bytes() for path in folder.iterdir()}
    with hub_that_takes() as (address, files, _):
        monkeypatch.setattr(upload.huggingface_hub, "HfApi", lambda: HfApi(endpoint=address, token="hf_none"))
        upload.push(folder, "owner/made")
    assert json.loads(files["adapter_config.json"]) == {"r": 4, "base_model_name_or_path": "owner/made"}
    listed = json.loads(files["sparsity.json"])["adapter_config_sha256"]
    assert listed == hashlib.sha256(files["adapter_config.json"]).hexdigest()
    assert set(files) == set(local) and files["config.json"] == local["config.json"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == local, "the folder stays as it is"
    # Also where the hub refuses.
    with hub_that_takes(refuses=True) as (address, files, _):
        monkeypatch.setattr(upload.huggingface_hub, "HfApi", lambda: HfApi(endpoint=address, token="hf_none"))
        with pytest.raises(ValueError, match="the hub did not take it"):
            upload.push(folder, "owner/made")
    assert not files and {path.name: path.read_bytes() for path in folder.iterdir()} == local


def test_a_hub_that_refuses_or_does_not_answer_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub_that_takes(refuses=True) as (address, files, _):
        monkeypatch.setattr(upload.huggingface_hub, "HfApi", lambda: HfApi(endpoint=address, token="hf_none"))
        assert main(["card", str(folder), "--push", "owner/made"]) == 2
        assert not files
    assert "--push owner/made: the hub did not take it (" in capsys.readouterr().err
    assert main(["card", str(folder), "--push", "owner/made"]) == 2
    assert "check name, network and token" in capsys.readouterr().err
