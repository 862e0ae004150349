"""Small folders in the layouts that datasets have on the hub: allenai/c4 and allenai/dolmino-mix-1124."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow


def write_c4(folder: Path, lengths: Sequence[int]) -> None:
    """Shards of `lengths` documents, "<shard> <number>", as en/c4-train.00000-of-01024.json.gz and its like."""
    for split, of_split in (("train", lengths), ("validation", (2,))):
        for shard, length in enumerate(of_split):
            prefix = f"{shard}" if split == "train" else "validation"
            records = [
                {"text": f"{prefix} {i}", "timestamp": "2019-04-25T12:57:54Z", "url": "http://x"} for i in range(length)
            ]
            _write(folder / "en" / f"c4-{split}.{shard:05d}-of-{len(of_split):05d}.json.gz", records)
    paths = [{"split": split, "path": f"en/c4-{split}.*.json.gz"} for split in ("train", "validation")]
    _write_card(folder, [{"config_name": "en", "data_files": paths}])


def write_dolmino(folder: Path) -> dict[str, list[str]]:
    """Write one folder a source, with shards of several compressions and schemas; return the texts of every file."""

    def common(text: str, **more: Any) -> dict[str, Any]:
        return {"id": text, "text": text, **more}

    files: dict[str, list[dict[str, Any]]] = {
        "data/dclm/0000/dclm-0000.json.zst": [
            common(f"dclm {i}", metadata={"url": "http://x", "fasttext": 0.5}, added="2024") for i in range(2)
        ],
        "data/dclm/0001/dclm-0000.json.zst": [common(f"dclm {i}", attributes={"bff": [[0, 1, 0.1]]}) for i in (2, 3)],
        "data/flan/flan-0000.json.gz": [common(f"flan {i}", source="flan", created=None) for i in range(6)],
        "data/math/codesearchnet-owmfilter/a.jsonl.gz": [
            common(f"code {i}", metadata={"score": "high"}, added="2024-10-01") for i in range(2)
        ],
        # The same columns with other types, and others.
        "data/math/gsm8k/v0/train.jsonl": [
            common(f"gsm {i}", metadata=["a", 1], added=20241001, created=1.5) for i in range(3)
        ],
        "data/math/mathcoder2/b.jsonl.zst": [
            {"text": f"mc {i}", "metadata": None, "score": {"a": i}} for i in range(2)
        ],
        # The types change within one file.
        "data/math/metamath-owmfilter/c.json.gz": [
            {"text": "meta 0", "metadata": {"x": 1}},
            {"metadata": "x", "text": "meta 1", "id": 7},
        ],
        "data/pes2o/pes2o-0000.json.gz": [common(f"pes2o {i}", source="s2ag", version="v2") for i in range(3)],
        "data/stackexchange/stackexchange-0000.json.gz": [common(f"se {i}") for i in range(2)],
        "data/wiki/wiki-0000.json.gz": [common(f"wiki {i}", created="2023") for i in range(3)],
    }
    for path, records in files.items():
        _write(folder / path, records)
    _write(folder / "held_out" / "x.jsonl", [{"text": "not for training"}])
    (folder / "tables").mkdir()
    (folder / "tables" / "t.pdf").write_text("no text")
    _write_card(
        folder,
        [
            {"config_name": "default", "data_files": [{"split": "train", "path": "data/**/*"}], "default": True},
            *(
                {"config_name": name, "data_files": [{"split": "train", "path": f"data/{name}/**/*"}]}
                for name in ("dclm", "flan", "math", "pes2o", "stackexchange", "wiki")
            ),
            {"config_name": "held_out", "data_files": [{"split": "test", "path": "held_out/*"}]},
            {"config_name": "tables", "data_files": [{"split": "train", "path": "tables/*"}]},
        ],
    )
    return {path: [record["text"] for record in records] for path, records in files.items()}


def zstd(content: bytes) -> bytes:
    """Compress to one zstandard frame."""
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def _write(path: Path, records: Sequence[dict[str, Any]]) -> None:
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    packs = {".gz": gzip.compress, ".zst": zstd}
    path.write_bytes(packs[path.suffix](content) if path.suffix in packs else content)


def _write_card(folder: Path, configs: list[dict[str, Any]]) -> None:
    """Write the part of README.md that lists the files of each configuration; JSON is YAML."""
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
