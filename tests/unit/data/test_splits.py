"""Files of a folder that are read: those of a split, whoever wrote the folder."""

from __future__ import annotations

import os
import shutil

import datasets
import pytest

from sparseforge_ds.data import splits
from sparseforge_ds.data.mixture import find_source
from sparseforge_ds.data.splits import find_files, split_named_in
from sparseforge_ds.data.text_files import TextOptions
from tests.hub_folders import write_c4, write_dolmino

RECORD = '{"text": "x"}\n'


def names(folder, split="train"):
    return list(find_files(folder, split).names)


def write(folder, *files):
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(RECORD)
    return folder


def saved_dict(folder):
    """Write a DatasetDict with a cache, and with a split of another name, which is not trained on unasked."""
    splits = {"train": ["one", "two"], "test": ["three"], "kept_back": ["four"]}
    dictionary = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
    )
    dictionary.save_to_disk(folder)
    datasets.load_from_disk(folder)["train"].filter(lambda record: record["text"] == "two")
    assert list((folder / "train").glob("cache-*.arrow")), "a cache that is no data"
    return folder


@pytest.mark.parametrize("stream", ["", "stream:"])
def test_a_saved_dataset_dict_is_read_by_its_splits(tmp_path, stream):
    folder = saved_dict(tmp_path / "saved")

    def texts(split, folder=folder):
        source = find_source(f"{stream}{folder}", TextOptions(split=split))
        return list(source.read())

    assert texts("train") == ["one", "two"]
    assert texts("test") == ["three"]
    assert texts("train", folder / "kept_back") == ["four"]
    assert texts("train", folder / "test") == ["three"], "what is named itself is read"
    with pytest.raises(ValueError, match=r"no split validation \(there are: test, train\).*--split"):
        texts("validation")
    shutil.copytree(folder, tmp_path / "more" / "deep")
    assert texts("train", tmp_path / "more") == ["one", "two"]
    line = find_files(folder).describe()
    assert line.startswith("1 file of split train: train/data-00000-of-00001.arrow, ")
    assert line.endswith("; left out: 1 of no split, 1 of split test")


def test_a_real_saved_set_has_validation_only_and_its_cache_is_no_data(assets):
    folder = assets / "benchmarks" / "boolq"
    with pytest.raises(ValueError, match=r"no split train \(there are: validation\); choose one with --split"):
        find_files(folder)
    assert names(folder, "validation") == ["none/validation/data-00000-of-00001.arrow"]
    assert names(folder / "none" / "validation") == ["data-00000-of-00001.arrow"]


@pytest.mark.parametrize(
    ("files", "train"),
    [
        (["a.jsonl", "b/c.txt"], ["a.jsonl", "b/c.txt"]),
        (["train.jsonl", "test.jsonl"], ["train.jsonl"]),
        (["train/a.jsonl", "test/a.jsonl", "dev/a.jsonl"], ["train/a.jsonl"]),
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], ["data/train-00000-of-00001.jsonl"]),
        (["c4-train.00000-of-00002.json.gz", "c4-validation.0.json.gz"], ["c4-train.00000-of-00002.json.gz"]),
        (["train-1.jsonl", "test-1.jsonl", "unsupervised-1.jsonl"], ["train-1.jsonl"]),
        (["a.jsonl", "b/train.jsonl"], ["a.jsonl", "b/train.jsonl"]),  # nothing else is named
        (["a.jsonl", "eval.jsonl", "latest.jsonl"], ["a.jsonl", "latest.jsonl"]),
        (["eval_sets/train/a.jsonl", "eval_sets/b.jsonl"], ["eval_sets/train/a.jsonl"]),
        (["TRAIN/a.jsonl", "TEST/a.jsonl"], ["TRAIN/a.jsonl"]),
        (["a.jsonl", ".b.jsonl", ".git/c.jsonl", ".cache/d.txt", "__pycache__/e.txt"], ["a.jsonl"]),
        (["a.jsonl", "cache-0123456789abcdef.arrow", "dataset_info.json", "README.md"], ["a.jsonl"]),
    ],
)
def test_names_say_which_split(tmp_path, files, train):
    assert names(write(tmp_path, *files)) == train


def test_files_that_say_nothing_of_splits_are_train(tmp_path):
    write(tmp_path, "a.jsonl", "b.jsonl")
    with pytest.raises(ValueError, match=r"has no split test \(there are: train\)"):
        find_files(tmp_path, "test")
    assert names(tmp_path / "a.jsonl", "test") == ["a.jsonl"], "a file that is named is read"


def test_the_hubs_own_names_of_shards_are_known(tmp_path):
    write(tmp_path, "data/train_sft-00000-of-00001-8f2c.jsonl", "data/test_sft-00000-of-00001-77a1.jsonl")
    with pytest.raises(ValueError, match=r"no split train \(there are: test_sft, train_sft\)"):
        find_files(tmp_path)
    assert names(tmp_path, "train_sft") == ["data/train_sft-00000-of-00001-8f2c.jsonl"]


def test_a_datasets_card_decides_where_there_is_one(tmp_path):
    write_c4(tmp_path / "c4", (2, 1))
    assert names(tmp_path / "c4") == [f"en/c4-train.{i:05d}-of-00002.json.gz" for i in range(2)]
    expected = write_dolmino(tmp_path / "dolmino")
    assert list(expected) == names(tmp_path / "dolmino"), "and not held_out/x.jsonl, which it calls test"
    assert names(tmp_path / "dolmino", "test") == ["held_out/x.jsonl"]
    (tmp_path / "c4" / "README.md").write_text("---\nconfigs: [{config_name: a, data_files: 3}]\n---\n")
    with pytest.raises(ValueError, match="README.md is no readable dataset card"):
        find_files(tmp_path / "c4")
    (tmp_path / "c4" / "README.md").write_text("# Notes\n")
    assert len(names(tmp_path / "c4")) == 2


DAMAGED = (
    *("configs: [5]", "configs: 5", "configs: [{data_files: 'a.jsonl'}]", "configs: " + "[" * 3000),
    *(
        f"configs: [{{config_name: a, data_files: '{odd}'}}]"
        for odd in ("/**", "../**", "~/**", "data**/*.jsonl", "a/../../*", "*a" * 99)
    ),
    *(f"configs: [{{config_name: a, data_files: '*', data_dir: {odd}}}]" for odd in ("5", "/", "..", "[a]")),
    "x: " + "y" * 2**20,
    "a: &a [b]\nconfigs: [{config_name: a, data_files: *a}]",
    "---x: 1\na: &a [b]\nconfigs: [{config_name: a, data_files: *a}]",
)


@pytest.mark.parametrize("card", DAMAGED, ids=lambda card: card[:60])
def test_a_hostile_card_is_one_error_and_walks_nothing(tmp_path, card, monkeypatch):
    write(tmp_path, "data/a.jsonl")
    (tmp_path / "data" / "README.md").write_text(f"---\n{card}\n---\n")
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top, *a, **k: walk(top, *a, **k) if top == tmp_path / "data" else 1 / 0)
    with pytest.raises(ValueError, match="README.md is no readable dataset card .*; repair or remove it") as refused:
        find_files(tmp_path / "data")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 700


@pytest.mark.parametrize(
    ("name", "split"),
    [("data/part-00000-of-00002.parquet", "part"), ("test/train.txt", "test"), ("a/valid/b/c.txt", "validation")],
)
def test_folders_decide_before_files(name, split):
    assert split_named_in(name) == {split}


def test_links_are_followed_once_and_one_to_nothing_is_named(tmp_path):
    write(tmp_path, "blobs/0a1b", "real/a.jsonl")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    os.symlink(tmp_path / "blobs" / "0a1b", folder / "train.jsonl")
    os.symlink(tmp_path / "real", folder / "linked")
    os.symlink(folder, folder / "linked_back")
    assert names(folder) == ["linked/a.jsonl", "train.jsonl"]
    os.symlink(tmp_path / "nowhere.jsonl", folder / "z.jsonl")
    with pytest.raises(ValueError, match=r"z\.jsonl is a link to nothing"):
        find_files(folder)


def test_a_folder_with_the_name_of_a_file_is_a_folder(tmp_path):
    write(tmp_path, "out.jsonl/part-0.jsonl", "out.jsonl/part-1.jsonl")
    assert names(tmp_path / "out.jsonl") == ["part-0.jsonl", "part-1.jsonl"]
    assert names(tmp_path) == ["out.jsonl/part-0.jsonl", "out.jsonl/part-1.jsonl"]


def test_a_long_list_is_shortened_on_the_screen(tmp_path):
    write(tmp_path, *(f"{i:03d}.jsonl" for i in range(100)))
    assert find_files(tmp_path).describe() == ("100 files of split train: 000.jsonl to 099.jsonl, 1,400 bytes")
    assert find_files(tmp_path / "000.jsonl").describe() == "000.jsonl, 14 bytes"


def test_files_that_may_be_text_and_are_not_read_are_counted(tmp_path):
    write(tmp_path, "a.jsonl", "b.csv", "c.CSV", "e.csv.gz", "d.jsonl.lz4", "README.md", "logo.png")
    assert find_files(tmp_path).describe() == (
        "1 file of split train: a.jsonl, 14 bytes; left out: 3 of a kind that is not read (.csv), "
        "1 of a kind that is not read (.lz4)"
    )


def test_a_file_is_known_by_all_of_its_bytes(tmp_path):
    path = tmp_path / "a.txt"
    content = bytearray(os.urandom(1_000_000).hex().encode())
    path.write_bytes(content)
    before = find_files(path).contents
    content[123_456] ^= 1
    path.write_bytes(content)
    assert find_files(path).contents != before


@pytest.mark.parametrize("position", [0, 700_000, 1_999_999])
def test_files_of_too_many_bytes_are_known_by_samples(tmp_path, position, monkeypatch):
    """Find every change at an end, and one that moves what follows."""
    monkeypatch.setattr(splits, "MOST_HASHED", 2**20)
    path = tmp_path / "a.txt"
    content = bytearray(os.urandom(1_000_000).hex().encode())
    path.write_bytes(content)
    before = find_files(path).contents
    os.utime(path, (1, 1))
    assert find_files(path).contents == before
    if position == 700_000:
        del content[position]
    else:
        content[position] ^= 1
    path.write_bytes(content)
    assert find_files(path).contents != before


def test_shards_of_mosaicml_are_refused(tmp_path):
    """Not read as their index.json, which is a file of JSON."""
    for name in ("index.json", "shard.00000.mds", "packed/index.json", "packed/shard.00000.mds.zstd"):
        write(tmp_path / "one", name)
    write(tmp_path, "train/shard.00000.mds")
    for path in (tmp_path / "one", tmp_path / "one" / "packed", tmp_path, tmp_path / "train" / "shard.00000.mds"):
        with pytest.raises(
            ValueError, match=f"--dataset {path}: has MosaicML's shards .*parquet with a column input_ids"
        ):
            find_source(str(path))


@pytest.mark.parametrize("stream", ["", "stream:"])
@pytest.mark.parametrize("pipe", ["text.jsonl", "text.txt", "tokens.bin"])
def test_a_pipe_is_refused_before_it_is_opened(tmp_path, stream, pipe):
    """Opening one would wait for a writer, which may never come."""
    named = "tokens.idx" if pipe == "tokens.bin" else pipe
    (tmp_path / "tokens.idx").write_bytes(b"")
    os.mkfifo(tmp_path / pipe)
    with pytest.raises(ValueError, match=rf"--dataset {tmp_path / pipe}: is a pipe or a device; write its text"):
        find_source(f"{stream}{tmp_path / named}", TextOptions())
