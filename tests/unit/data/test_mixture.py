"""`--dataset` with several sources: shares become whole numbers, and what cannot be meant is refused."""

from __future__ import annotations

import gzip
import json
from fractions import Fraction

import pytest

from sparseforge_ds.data.hub_text import HubText
from sparseforge_ds.data.mixture import file_lines, find_source, find_text
from sparseforge_ds.data.round_robin import integer_shares
from sparseforge_ds.data.text_files import LocalText, TextOptions
from tests.resident import peak_growth


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c", "date=2024"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n')
    return tmp_path


@pytest.mark.parametrize(
    ("dataset", "parts"),
    [
        (["a.jsonl=0.7", "b.jsonl=0.3"], (7, 3)),
        (["a.jsonl=70", "b.jsonl=30"], (7, 3)),
        (["a.jsonl=1e-3", "b.jsonl=1/500"], (1, 2)),
        (["a.jsonl", "b.jsonl", "c.jsonl"], (1, 1, 1)),
        (["a.jsonl=752e9", "b.jsonl=17e9", "c.jsonl=11e9"], (752, 17, 11)),
    ],
)
def test_shares_are_ratios(folder, dataset, parts):
    mixture = find_text(dataset)
    assert mixture.parts == parts
    assert sum(mixture.shares) == pytest.approx(1)


def test_sources_may_be_of_every_kind(folder):
    mixture = find_text(["a.jsonl=1", "stream:b.jsonl=2", "allenai/c4:en=3", "stdlib=4"])
    assert [type(source) for source in mixture.sources] == [LocalText, LocalText, HubText, LocalText]
    assert [source.streamed for source in mixture.sources] == [False, True, True, False]
    assert [source.name for source in mixture.sources] == ["a.jsonl", "stream:b.jsonl", "allenai/c4:en", "stdlib"]


def test_one_source_needs_no_share_and_what_exists_under_its_whole_name_has_none(folder):
    assert find_text(["a.jsonl=3"]) == find_text(["a.jsonl"])
    assert find_text(["date=2024.jsonl"]).sources[0].name == "date=2024.jsonl"
    (folder / "date=7").mkdir()
    (folder / "date=7" / "x.jsonl").write_text('{"text": "x"}\n')
    mixture = find_text(["stream:date=7=0.5", "date=2024.jsonl=0.5"])
    assert mixture.parts == (1, 1)


def test_many_digits_are_rounded_to_a_share_of_65536():
    shares = [Fraction("0.333333333"), Fraction("0.666666667"), Fraction("0.0001")]
    parts = integer_shares(["a", "b", "c"], shares)
    for part, share in zip(parts, shares, strict=True):
        assert abs(part / sum(parts) - float(share / sum(shares))) < 1 / 65536
    assert integer_shares(["a", "b"], [Fraction(1), Fraction(65535)]) == (1, 65535)
    with pytest.raises(ValueError, match=r"--dataset b=1e-9: less than one in 65,536 of all tokens; leave it out"):
        integer_shares(["a=1", "b=1e-9"], [Fraction(1), Fraction("1e-9")])


def test_dividing_needs_plain_text(folder):
    (folder / "a.txt").write_text("one\n\ntwo\n")
    assert list(find_text(["a.txt"], TextOptions(sample_by="paragraph")).sources[0].read()) == ["one", "two"]
    mixture = find_text(["a.jsonl", "stream:a.txt", "owner/name"], TextOptions(sample_by="line"))
    assert [source.identity for source in mixture.sources[1:]] != [
        source.identity for source in find_text(["a.jsonl", "stream:a.txt", "owner/name"]).sources[1:]
    ]
    assert file_lines(mixture.sources[1]) == ["a.txt, 9 bytes"]
    assert file_lines(find_text(["a.txt"]).sources[0]) == [
        "a.txt, 9 bytes",
        "a .txt file is one document; --sample_by paragraph or line divides it",
    ]
    for dataset in ("a.jsonl", "stdlib"):
        with pytest.raises(ValueError, match=f"--sample_by line: it divides .txt files, and --dataset {dataset} has"):
            find_text([dataset], TextOptions(sample_by="line"))
    # Text that is held out is divided too.
    lines = TextOptions(sample_by="line")
    find_text(["a.jsonl"], lines, find_source("a.txt", lines))
    with pytest.raises(ValueError, match="--dataset a.jsonl and --eval_dataset a.jsonl have none; leave it out"):
        find_text(["a.jsonl"], lines, find_source("a.jsonl", lines))


def test_a_field_needs_records(folder):
    (folder / "a.txt").write_text("one\n")
    (folder / "b.jsonl").write_text('{"body": "one"}\n')
    body = TextOptions(text_field="body")
    for dataset in ("a.txt", "stream:a.txt", "stdlib"):
        with pytest.raises(ValueError, match=f"--text_field body: {dataset} has no records, .*; leave it out"):
            find_text([dataset], body)
    with pytest.raises(ValueError, match="--text_field body: a.txt stdlib has no records"):
        find_text(["a.txt"], body, find_source("stdlib", body))
    for dataset in (["b.jsonl", "a.txt"], ["owner/name", "stdlib"]):
        find_text(dataset, body)
    find_text(["a.txt"], body, find_source("b.jsonl", body))


def test_a_split_needs_a_source_that_has_some(folder):
    """A file is read whatever its name says; one that names the split, or train where it names none, is of it."""
    record = '{"text": "one"}\n'
    for name in ("validation.jsonl", "train.jsonl", "parts/dev.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(record)
    validation = TextOptions(split="validation")
    for dataset in (["a.jsonl"], ["stream:a.jsonl"], ["train.jsonl"], ["a.jsonl=1", "b.jsonl=2"]):
        with pytest.raises(ValueError, match="--split validation: --dataset .*l is no folder or hub id, of which"):
            find_text(dataset, validation)
    for dataset in (["validation.jsonl"], ["parts"], ["a.jsonl", "parts"], ["owner/name", "a.jsonl"]):
        find_text(dataset, validation)
    find_text(["a.jsonl"], TextOptions(split="train+validation"))
    find_text(["validation.jsonl"])


@pytest.mark.parametrize("prefix", ["", "stream:"])
def test_a_text_that_is_too_large_for_one_document_is_refused_at_once(folder, prefix):
    for size, name in ((2**24, "fits.txt"), (2**24 + 1, "large.txt")):
        (folder / name).write_bytes((b"x" * 127 + b"\n") * (size // 128) + b"x" * (size % 128))
    (source,) = find_text([f"{prefix}fits.txt"]).sources
    assert [len(document) for document in source.read()] == [2**24]
    message = "large.txt: is one document of more than 16,777,216 bytes, .*several files .*--sample_by paragraph"
    with pytest.raises(ValueError, match=message):
        find_text([f"{prefix}large.txt"])
    find_text([f"{prefix}large.txt"], TextOptions(sample_by="paragraph"))
    (folder / "large.txt.gz").write_bytes(gzip.compress((folder / "large.txt").read_bytes(), 1))
    (source,) = find_text([f"{prefix}large.txt.gz"]).sources
    with pytest.raises(ValueError, match=message.replace("txt", "txt.gz")):
        list(source.read())


LINE = "a word and another one " * 20


@pytest.mark.parametrize(
    ("name", "line", "between"),
    [
        ("long.txt", LINE, "\n"),
        ("long.json", json.dumps({"text": LINE}), ", "),
        ("lines.json", json.dumps({"text": LINE}), ",\n"),
        ("long.json.gz", json.dumps({"text": LINE}), ", "),
        ("long.jsonl", json.dumps({"text": LINE}), "\n"),
    ],
)
def test_nothing_is_read_but_the_beginning(folder, name, line, between):
    """Begin to read an array too, which is often one long line: every rank looks."""
    content = between.join([line] * 2**15)
    content = f"[{content}]" if ".json" in name and "," in between else content
    (folder / name).write_bytes(gzip.compress(content.encode(), 1) if name.endswith(".gz") else content.encode())
    find_source("a.jsonl")  # what it imports is no text
    with peak_growth() as most:
        source = find_source(name)
    assert most() < len(content) / 3
    assert sum(map(len, source.read())) == len(LINE) * 2**15 + (2**15 - 1) * (name == "long.txt")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (["a.jsonl=0.7", "b.jsonl=0"], r"--dataset b.jsonl=0: '0' is no share; use SOURCE=NUMBER with a number > 0"),
        (["a.jsonl=-1", "b.jsonl=1"], "'-1' is no share"),
        (["a.jsonl=nan", "b.jsonl=1"], "'nan' is no share"),
        (["a.jsonl=inf", "b.jsonl=1"], "'inf' is no share"),
        (["a.jsonl=half", "b.jsonl=1"], "'half' is no share"),
        (["a.jsonl=", "b.jsonl=1"], "'' is no share"),
        (["a.jsonl=1/0", "b.jsonl=1"], "'1/0' is no share"),
        (["=0.5", "b.jsonl=1"], "no share"),
        (["a.jsonl=1e800", "b.jsonl=1e400"], "--dataset b.jsonl=1e400: less than one in 65,536 of all tokens"),
        (["a.jsonl=0.7", "b.jsonl"], "--dataset b.jsonl: has no share, others have; give all or none"),
        (["a.jsonl=0.7", "b.jsonl=0.1", "a.jsonl=0.2"], "--dataset a.jsonl: is named 2 times"),
        (["a.jsonl=0.7", "./a.jsonl=0.2"], r"--dataset a.jsonl and ./a.jsonl: both read /.*/a.jsonl; name it once"),
        (["stream:.=0.7", "b.jsonl=0.2"], r"--dataset stream:. and b.jsonl: both read /.*/b.jsonl; name it once"),
        (["a.jsonl=0.7", "none.jsonl=0.3"], "--dataset none.jsonl: no such file"),
        (["stream:"], "--dataset 'stream:': names no text"),
        (["x" * 300], r"^--dataset x{190}: cannot be looked at \(File name too long\); check its name and its perm"),
        (["stream:a=" + "x" * 300, "b.jsonl=1"], r"^--dataset stream:a=x{181}: cannot be looked at"),
        (["stream:=0.5", "b.jsonl=1"], "--dataset 'stream:': names no text"),
    ],
)
def test_a_dataset_that_cannot_be_meant_is_one_error(folder, dataset, message):
    with pytest.raises(ValueError, match=message):
        find_text(dataset)
