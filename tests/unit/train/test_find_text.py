"""The texts of a run are looked at before anything is loaded or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.model.pretrained import find_model
from sparseforge_ds.train.find_text import find_texts


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
def test_a_text_without_a_byte_is_refused_and_an_empty_shard_is_not(tmp_path: Path, flag: str) -> None:
    model = find_model("stdlib_llama", "--model")

    def found(path: Path) -> object:
        given = {flag: [str(path)] if flag == "dataset" else str(path)}
        return find_texts(RunArguments(deepspeed="zero3", eval_split="train", **given), model)

    for name in ("empty.txt", "empty.jsonl"):
        (tmp_path / name).write_text("")
        with pytest.raises(ValueError, match=rf"^--{flag} \S+{name}: {name}, 0 bytes: there is no text in it"):
            found(tmp_path / name)
    with pytest.raises(ValueError, match=rf"^--{flag} \S+: 2 files of split train: .*, 0 bytes: there is no text"):
        found(tmp_path)
    (tmp_path / "more.txt").write_text("text")
    assert found(tmp_path)
