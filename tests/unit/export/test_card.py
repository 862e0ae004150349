"""Model cards: what an exported folder, its run and its scores say, as the hub reads it; and the upload."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard

from sparseforge_ds.cli.main import main
from sparseforge_ds.export import card
from sparseforge_ds.export.source import published_name
from sparseforge_ds.mask.packing import PACKED24
from tests.tiny_folders import write_json

RUN = {
    "model": "owner/dense-1b",
    "teacher": None,
    "dataset": ["allenai/c4:en", "own.jsonl"],
    "seq_length": 64,
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
    """What a card reads of an export."""
    made = tmp_path / "made"
    made.mkdir()
    write_json(made / "sparsity.json", RECORD)
    write_json(made / "config.json", {"model_type": "llama"})
    return made


def test_a_card_says_what_is_known(folder: Path, tmp_path: Path) -> None:
    perplexity = {
        "dtype": "bfloat16",
        "perplexity": {"text": "wikitext2", "perplexity": 12.5, "protocol": "windows", "seq_length": 4096},
    }
    zero_shot = {"zero_shot": {"tasks": {"arc_easy": {"acc": 0.5, "acc_norm": 0.45, "acc_stderr": 0.1}}, "limit": 40}}
    files = [str(write_json(tmp_path / f"{n}.json", each)) for n, each in enumerate((perplexity, zero_shot))]
    assert main(["card", str(folder), "--results", *files, "--license", "apache-2.0"]) == 0
    made = ModelCard.load(folder / "README.md")
    data = made.data
    assert (data.base_model, data.datasets, data.license) == ("owner/dense-1b", ["allenai/c4"], "apache-2.0")
    assert data.library_name == "transformers" and {"2:4", "sparse"} <= set(data.tags)
    found = {(each.dataset_name, each.metric_name): each for each in data.eval_results}
    assert {key: each.metric_value for key, each in found.items()} == {
        ("held_out.jsonl", "perplexity"): 7.389056,
        ("wikitext2", "perplexity"): 12.5,
        ("arc_easy", "acc"): 0.5,
        ("arc_easy", "acc_norm"): 0.45,
    }
    assert found["wikitext2", "perplexity"].dataset_args == {
        "protocol": "windows",
        "seq_length": 4096,
        "dtype": "bfloat16",
    }
    for words in ("# dense-1b 2:4", "| steps | 400 |", "| tokens | 640,000 |", "`own.jsonl`", "7.38906 (sequences 8"):
        assert words in made.text, words


def test_a_card_of_a_model_with_branches_says_what_loads_them(folder: Path) -> None:
    write_json(folder / "config.json", {"quantization_config": {"quant_method": PACKED24, "low_rank": {"a": 4}}})
    text = str(card.make_card(folder, name="owner/name"))
    assert "## A model with low-rank branches" in text and "`sparseforge export owner/name OUT --format hf`" in text
    write_json(folder / "config.json", {})
    write_json(folder / "adapter_config.json", {"r": 8, "rank_pattern": {"a": 16}})
    text = str(card.make_card(folder))
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
    assert published_name(name) == published


def test_what_is_no_export_and_no_result(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"steps": 3}')
    for arguments, said in (
        ([str(tmp_path)], "has no sparsity.json"),
        ([str(folder), "--results", str(tmp_path / "other.json")], "is no result of"),
        (
            [str(folder), "--results", "nothere.json"],
            "--results nothere.json: no such file; give what sparseforge eval",
        ),
        ([str(folder), "--private"], "--private: it belongs to --push"),
        ([str(folder), "--push", "name"], "--push name: give owner/name"),
    ):
        assert main(["card", *arguments]) == 2
        assert said in capsys.readouterr().err
    write_json(folder / "sparsity.json", {**RECORD, "run": ["a"]})
    assert main(["card", str(folder)]) == 2
    assert "run is damaged" in capsys.readouterr().err


@contextlib.contextmanager
def hub_that_takes(refuses: bool = False) -> Iterator[tuple[str, dict[str, bytes], list[str]]]:
    """A hub of models: its address, the files that were committed, and the paths that were asked for."""
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
                named = [each["path"] for each in json.loads(body)["files"]]
                modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in named]
                return self.answer(200, {"files": modes})
            if "/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                made = {"commitUrl": f"{address}/owner/made/commit/a", "commitOid": "a" * 40, "hookOutput": ""}
                return self.answer(200, made)
            return self.answer(200, {"errors": [], "warnings": []})  # of the check of a card's metadata

        def do_GET(self) -> None:
            asked.append(self.path)
            self.answer(200, {"id": "owner/made", "sha": "a" * 40, "siblings": []})

        def answer(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

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
        monkeypatch.setattr(card.huggingface_hub, "HfApi", lambda: HfApi(endpoint=address, token="hf_none"))
        assert main(["card", str(folder), "--push", "owner/made"]) == 0
    assert f"uploaded: {address}/owner/made" in capsys.readouterr().out
    assert set(files) == {path.name for path in folder.iterdir()} == {"README.md", "config.json", "sparsity.json"}
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert 'from_pretrained("owner/made")' in files["README.md"].decode()
    assert asked[0] == "/api/repos/create" and asked[-1] == "/api/models/owner/made/commit/main"


def test_a_hub_that_refuses_or_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hub_that_takes(refuses=True) as (address, files, _):
        monkeypatch.setattr(card.huggingface_hub, "HfApi", lambda: HfApi(endpoint=address, token="hf_none"))
        assert main(["card", str(folder), "--push", "owner/made"]) == 2
        assert not files
    assert "--push owner/made: the hub did not take it (" in capsys.readouterr().err
    assert main(["card", str(folder), "--push", "owner/made"]) == 2
    assert "check name, network and token" in capsys.readouterr().err
