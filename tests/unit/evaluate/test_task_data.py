from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from sparseforge_ds.evaluate.task_data import find_data


def test_files_and_folders(tmp_path: Path) -> None:
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


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"a": i} for i in range(6)])
    DatasetDict(train=rows, validation=rows).save_to_disk(tmp_path / "glue" / "rte")
    DatasetDict(validation=rows, test=rows).save_to_disk(tmp_path / "ai2_arc" / "ARC-Easy")
    rows.save_to_disk(tmp_path / "boolq" / "none" / "validation", num_shards=2)
    found = find_data(["rte", "arc_easy", "boolq"], [str(tmp_path)])
    assert found["rte"] == [tmp_path / "glue" / "rte" / "validation" / "data-00000-of-00001.arrow"]
    assert found["arc_easy"] == [tmp_path / "ai2_arc" / "ARC-Easy" / "test" / "data-00000-of-00001.arrow"]
    (tmp_path / "boolq" / "none" / "validation" / "cache-65119c322cda08a4.arrow").touch()  # as `map` leaves them
    assert find_data(["boolq"], [str(tmp_path)])["boolq"] == found["boolq"]
    assert [path.name for path in found["boolq"]] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]

    found["boolq"][1].unlink()
    with pytest.raises(ValueError, match="not those that state.json lists"):
        find_data(["boolq"], [str(tmp_path)])
    state = tmp_path / "glue" / "rte" / "validation" / "state.json"
    content = json.loads(state.read_text())
    state.write_text(json.dumps(content | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(ValueError, match=r"call flatten_indices\(\) before save_to_disk"):
        find_data(["rte"], [str(tmp_path)])
    state.write_text("{")
    with pytest.raises(ValueError, match="state.json: damaged"):
        find_data(["rte"], [str(tmp_path)])
    (tmp_path / "piqa" / "one").mkdir(parents=True)
    (tmp_path / "piqa" / "two").mkdir()
    with pytest.raises(ValueError, match="piqa: give files of one kind"):
        find_data(["piqa"], [str(tmp_path)])
