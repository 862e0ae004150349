from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from sparseforge_ds.evaluate.task_data import find_data


def test_files_and_folders(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"a": i} for i in range(3)])
    (tmp_path / "piqa").mkdir()
    rows.to_parquet(tmp_path / "piqa" / "a.parquet")
    (tmp_path / "piqa" / "info.json").touch()
    rows.to_json(tmp_path / "boolq.jsonl")
    (tmp_path / "mixed").mkdir()
    rows.to_parquet(tmp_path / "mixed" / "a.parquet")
    rows.to_json(tmp_path / "mixed" / "a.jsonl")
    assert find_data(["piqa"], []) == {}
    found = find_data(["piqa", "boolq"], [str(tmp_path)])
    assert {task: place for task, (place, _) in found.items()} == {
        "piqa": tmp_path / "piqa",
        "boolq": tmp_path / "boolq.jsonl",
    }
    assert all(each.rows["a"][:] == [0, 1, 2] for each in found.values())
    assert find_data(["rte"], [f"rte={tmp_path / 'boolq.jsonl'}"])["rte"].place == tmp_path / "boolq.jsonl"
    with pytest.raises(ValueError, match="no data of rte; looked for"):
        find_data(["piqa", "rte"], [str(tmp_path)])
    with pytest.raises(ValueError, match="mixed: cannot be read .give files of one kind"):
        find_data(["piqa"], [f"piqa={tmp_path / 'mixed'}"])
    with pytest.raises(ValueError, match="boolq is not in --tasks piqa"):
        find_data(["piqa"], ["boolq=x"])


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"a": i} for i in range(6)])
    DatasetDict(train=rows.select(range(2)), validation=rows).save_to_disk(tmp_path / "glue" / "rte")
    DatasetDict(validation=rows, test=rows.select(range(3))).save_to_disk(tmp_path / "ai2_arc" / "ARC-Easy")
    rows.save_to_disk(tmp_path / "boolq" / "none" / "validation", num_shards=2)
    rows.select([4, 1]).save_to_disk(tmp_path / "openbookqa" / "test")
    tasks = ["rte", "arc_easy", "boolq", "openbookqa"]
    (tmp_path / "boolq" / "none" / "validation" / "cache-65119c322cda08a4.arrow").touch()  # as `map` leaves them
    found = {task: each.rows["a"][:] for task, each in find_data(tasks, [str(tmp_path)]).items()}
    whole = [*range(6)]
    assert found == {"rte": whole, "arc_easy": [0, 1, 2], "boolq": whole, "openbookqa": [4, 1]}

    (tmp_path / "boolq" / "none" / "validation" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(ValueError, match=r"boolq/none/validation: cannot be read .*data-00001-of-00002\.arrow"):
        find_data(["boolq"], [str(tmp_path)])
    (tmp_path / "glue" / "rte" / "validation" / "state.json").write_text("{")
    with pytest.raises(ValueError, match="glue/rte/validation: cannot be read"):
        find_data(["rte"], [str(tmp_path)])
    (tmp_path / "piqa" / "one").mkdir(parents=True)
    (tmp_path / "piqa" / "two").mkdir()
    with pytest.raises(ValueError, match="piqa: cannot be read .give files of one kind"):
        find_data(["piqa"], [str(tmp_path)])
