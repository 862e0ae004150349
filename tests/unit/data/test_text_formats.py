"""Every kind of file that text comes in, and every way in which one can be unusable."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import locale
import lzma

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from sparseforge_ds.data import text_formats
from sparseforge_ds.data.local_rows import load_rows
from sparseforge_ds.data.mixture import find_source
from sparseforge_ds.data.text_files import TextOptions
from sparseforge_ds.data.text_formats import LARGEST_DOCUMENT, iter_documents
from tests.hub_folders import zstd
from tests.resident import peak_growth

TEXTS = ['one, "quoted"', "two\nlines\tand a tab", "tr\N{LATIN SMALL LETTER E WITH ACUTE}s " + "long " * 50_000]
PACKS = {"": bytes, ".gz": gzip.compress, ".zst": zstd, ".bz2": bz2.compress, ".xz": lzma.compress}


CONTENTS = {
    ".jsonl": "\n\n".join(json.dumps({"n": i, "text": text}) for i, text in enumerate(TEXTS)),
    ".json": "\n".join(json.dumps({"n": i, "text": text}) for i, text in enumerate(TEXTS)),
}
ARRAY = json.dumps([{"text": text} for text in TEXTS], indent=1)


def read(path, **options):
    return list(find_source(str(path), TextOptions(**options)).read())


@pytest.mark.parametrize("compression", PACKS)
@pytest.mark.parametrize("kind", CONTENTS)
def test_records_are_read_plain_and_compressed_with_a_byte_order_mark_and_windows_line_ends(
    tmp_path, kind, compression
):
    path = tmp_path / f"a{kind}{compression}"
    path.write_bytes(PACKS[compression](CONTENTS[kind].encode()))
    assert read(path) == TEXTS
    path.write_bytes(PACKS[compression](b"\xef\xbb\xbf" + CONTENTS[kind].encode()))
    assert read(path) == TEXTS
    if kind.startswith(".json"):
        path.write_bytes(PACKS[compression](CONTENTS[kind].replace("\n", "\r\n").encode()))
        assert read(path) == TEXTS
    path = path.rename(tmp_path / f"A{kind.upper()}{compression}")
    assert read(path) == TEXTS
    assert read(f"{tmp_path}") == TEXTS
    path.write_bytes(PACKS[compression](b""))
    assert read(path) == [], "an empty file has no documents"


@pytest.mark.parametrize("compression", PACKS)
def test_plain_text_is_one_document_or_divided(tmp_path, compression):
    path = tmp_path / f"a.txt{compression}"
    path.write_bytes(PACKS[compression](b"\xef\xbb\xbfone\r\nstill one\r\n \r\n\r\ntwo\r\n"))
    assert read(path) == ["one\nstill one\n \n\ntwo\n"]
    path.write_bytes(PACKS[compression](b"\xef\xbb\xbfone\r\nstill one\r\n\r\n\r\n\r\ntwo\r\n"))
    assert read(path, sample_by="paragraph") == ["one\nstill one", "two"]
    assert read(path, sample_by="line") == ["one", "still one", "two"]


@pytest.mark.parametrize("head", ["", "\n \n", "\ufeff"])
def test_a_json_file_may_be_one_array(tmp_path, head):
    path = tmp_path / "a.json"
    path.write_text(head + ARRAY, encoding="utf-8")
    assert read(path) == TEXTS
    long = [{"text": "a" * 2**19}, {"text": "b"}]  # the first record is longer than what is read at a time
    path.write_text(head + json.dumps(long), encoding="utf-8")
    assert read(path) == [record["text"] for record in long]
    path.write_text(f"{head} [ ] ", encoding="utf-8")
    assert read(path) == []
    path.write_text(head + json.dumps([{"text": "a"}, 3]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.json, record 2: not an object"):
        read(path)
    path.write_text(head + ARRAY[:-20], encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.json: not a JSON array"):
        read(path)
    path.write_text(head + ARRAY[:3], encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.json: not a JSON array"):
        find_source(str(path))
    path.write_text(head + '{\n"text": "x"\n}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="line .*: not JSON .*one object a line, or in a .json file one array"):
        read(path)


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array(TEXTS, pyarrow.large_string()),
        pyarrow.array(TEXTS, pyarrow.string_view()),
        pyarrow.array(TEXTS).dictionary_encode(),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("kind", ["parquet", "stream.arrow", "file.arrow"])
def test_columns_of_every_type_of_text_are_read(tmp_path, column, kind):
    path = tmp_path / kind
    table = pyarrow.table({"n": [1, 2, 3], "text": column})
    if kind == "parquet":
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(table, path)
    else:
        new = pyarrow.ipc.new_stream if kind.startswith("stream") else pyarrow.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
    assert read(path) == TEXTS


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pyarrow.array([["a"], ["b"]]), "list"),
        (pyarrow.array([{"a": "b"}, None]), "dict"),
        (pyarrow.array([1, 2]), "int"),
        (pyarrow.array([b"a", b"b"]), "bytes"),
    ],
)
def test_columns_of_something_else_are_refused_at_once(tmp_path, column, kind):
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    message = rf"a\.parquet, row 0: field 'text' is {kind}, not text .*; make it one of these, or name another field by"
    with pytest.raises(ValueError, match=message):
        find_source(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"body": "x"}\n', r"a\.jsonl, line 1: no field 'text'.*--text_field.*body"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: field 'text' is int, not text"),
        ("a.jsonl", b'{"text": "x"\n', "line 1: not JSON"),
        ("a.jsonl", b'["text"]\n', "line 1: not an object"),
        ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}\n", "line 1: not JSON"),
        ("a.jsonl", b"\xff\xfe\n", "not readable.*UTF-8"),
        ("a.txt", b"\xff\xfe", "not readable.*iconv"),
        ("a.parquet", b"PAR1 is not enough", r"a\.parquet: not readable .*; repair"),
        ("a.parquet", b"", r"a\.parquet: not readable .*; repair"),
        ("a.arrow", b"nothing of the kind", r"a\.arrow: not readable .*; repair"),
        ("a.arrow", b"", r"a\.arrow: not readable .*; repair"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "line 1: not JSON"),
        ("a.json", b'[{"text": ' + b"[" * 100_000, "not a JSON array"),
        ("a.json", b'[{"text": "x", "n": ' + b"9" * 5000 + b"}]", "not a JSON array"),
        ("a.xml", b"<text/>", r"unknown kind of file '.xml'; use one of .txt, .jsonl, .json \(each"),
        *((f"a.json{end}", b"nothing of the kind", f"a.json{end}: not readable.*repair") for end in PACKS if end),
    ],
)
def test_an_unusable_file_says_why(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_a_column_of_a_type_that_datasets_lacks_is_named(tmp_path):
    pairs = pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "facts": pairs}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: Arrow type map<.*; write the columns with text to a file"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("end", [end for end in PACKS if end])
def test_a_compressed_file_that_breaks_off_says_so(tmp_path, end):
    packed = PACKS[end]("".join(json.dumps({"text": str(i**9)}) + "\n" for i in range(9999)).encode())
    (tmp_path / f"a.jsonl{end}").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=f"a.jsonl{end}(, after .* documents)?: not readable.*repair"):
        read(tmp_path / f"a.jsonl{end}")


def test_zstd_is_read_by_ours_also_where_fsspec_has_another(tmp_path, monkeypatch):
    """Read without the package zstandard, which takes a broken file, and one of several frames, for complete."""
    monkeypatch.setitem(fsspec.compression.compr, "zstd", lambda content, mode="rb": io.BytesIO(b'{"text": "x"}\n'))
    monkeypatch.setitem(fsspec.utils.compressions, "zst", "zstd")
    test_a_compressed_file_that_breaks_off_says_so(tmp_path, ".zst")
    (tmp_path / "b.jsonl.zst").write_bytes(zstd(b'{"text": "a"}\n') + zstd(b'{"text": "b"}\n'))
    assert read(tmp_path / "b.jsonl.zst") == ["a", "b"]
    with fsspec.open(tmp_path / "c.zst", "wb", compression="zstd") as file:
        file.write(b"others may still write it")
    with fsspec.open(tmp_path / "c.zst", "rb", compression="zstd") as file:
        assert file.read() == b"others may still write it"


def test_text_is_utf_8_whatever_the_environment_says(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(CONTENTS[".jsonl"], encoding="utf-8")
    monkeypatch.setattr(locale, "getpreferredencoding", lambda *_: "ISO-8859-1")
    assert read(tmp_path / "a.jsonl") == TEXTS


LONG = "x" * (LARGEST_DOCUMENT + 1)
RECORD = json.dumps({"text": LONG})
FIRST = json.dumps({"text": "a"})
TOO_LONG = {
    "a.jsonl": (f"{FIRST}\n{RECORD}\n", "a.jsonl, line 2: has more than 16,777,216 characters"),
    "a.json": (f"[{FIRST}, {RECORD}]", "a.json, record 2: has more than 16,777,216 characters"),
    "b.json": (f"[{FIRST}, {{'text': {RECORD}}}]", r"b.json: not a JSON array \(record 2: Expecting property name"),
    "a.jsonl.gz": (f"{FIRST}\n{RECORD}{LONG * 8}", "a.jsonl.gz, line 2: has more than"),
    "a.json.gz": (f"[{FIRST}, {RECORD}{LONG * 8}", "a.json.gz, record 2: has more than"),
    "a.txt.gz": (f"a\n{LONG[1:]}\n" * 8, "a.txt.gz: is one document of more than 16,777,216 bytes"),
    "paragraph.txt.gz": (f"a\n\n{(LONG[:999] + chr(10)) * 130000}", "the paragraph before line [0-9]+: has more than"),
    "line.txt.gz": (f"a\n{LONG * 8}", "line.txt.gz, line 2: has more than"),
    "a.parquet": ("", "a.parquet, row 1: has more than"),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_no_more_than_the_longest_record_is_read(tmp_path, name):
    """Not all of 128 MiB that a small file is unpacked to, either."""
    content, message = TOO_LONG[name]
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", LONG]}), path)
    else:
        path.write_bytes(gzip.compress(content.encode(), 1) if name.endswith("gz") else content.encode())
    options = {"sample_by": name.partition(".")[0]} if len(name.partition(".")[0]) > 1 else {}
    with peak_growth() as most, pytest.raises(ValueError, match=message):
        read(path, **options)
    assert most() < 10 * LARGEST_DOCUMENT


def test_an_array_is_read_a_record_at_a_time(tmp_path, monkeypatch):
    """Wherever the pieces of the file end."""
    records = [{"text": text, "n": [1, {"a": "]"}]} for text in ("a", "b, ]", '"[{', "tr\u00e9s \\ ", "")]
    path = tmp_path / "a.json"
    for indent, piece in itertools.product((None, 1), (1, 2, 3, 7, 50)):
        monkeypatch.setattr(text_formats, "PIECE_CHARACTERS", piece)
        path.write_text(f" {json.dumps(records, indent=indent)}\n", encoding="utf-8")
        assert read(path) == [record["text"] for record in records]
    for odd in ('[{"text": "a"} {"text": "b"}]', '[{"text": "a"},]', '[{"text": "a"}] x', "[,]", '[{"text": "a"}', "["):
        path.write_text(odd)
        with pytest.raises(ValueError, match=r"a\.json: not a JSON array \(record \d: .*repair"):
            read(path)


def test_null_is_an_empty_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n{"text": "a"}\n{"text": ""}\n')
    assert list(iter_documents(str(path), "text")) == ["", "a", ""]
    pyarrow.parquet.write_table(pyarrow.table({"text": [None, "x", None]}), tmp_path / "a.parquet")
    assert list(iter_documents(str(tmp_path / "a.parquet"), "text")) == ["", "x", ""]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_field_that_is_null_hides_no_other_and_is_none_of_its_kind(tmp_path, kind):
    """Merged datasets give every record all fields; one side of a pair may be missing."""
    records = [
        {"text": None, "messages": CHAT, "prompt": None, "completion": None, "input_ids": None},
        {"text": "a", "messages": None, "prompt": None, "completion": None, "input_ids": None},
        {"text": None, "messages": None, "prompt": CHAT[:1], "completion": None, "input_ids": None},
        {"text": None, "messages": None, "prompt": None, "completion": CHAT[1:], "input_ids": None},
        {"text": None, "messages": None, "prompt": None, "completion": None, "input_ids": [3, 4]},
        {"text": None, "messages": None, "prompt": None, "completion": None, "input_ids": None},
        {"text": " ", "messages": CHAT, "prompt": None, "completion": None, "input_ids": None},
        {"text": "", "messages": None, "prompt": None, "completion": None, "input_ids": None},
    ]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    chat, text, prompt, completion, ids, nothing, beside_empty, empty = read(path)
    assert list(beside_empty.messages) == CHAT and empty == ""
    assert (list(chat.messages), text, nothing) == (CHAT, "a", "")
    assert (list(prompt.messages), list(completion.messages)) == (CHAT[:1], CHAT[1:])
    assert ids.ids.tolist() == [3, 4]
    # A field that the user names has the text alone.
    assert list(iter_documents(str(path), "prompt"))[:2] == ["", ""]


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl", "a?b.jsonl", "a b.jsonl", ".hidden/a.jsonl", "__x/a.jsonl"])
def test_a_file_of_any_name_is_read(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(CONTENTS[".jsonl"])
    assert read(tmp_path / name) == TEXTS
    (array := (tmp_path / name).with_suffix(".json")).write_text(ARRAY)
    assert read(array) == TEXTS


@pytest.mark.parametrize("name", ["a::b.txt", "a::b/c.jsonl", "a::b.json", "a::b.parquet"])
def test_a_name_that_fsspec_takes_for_two_says_so(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=f"{name}: fsspec takes the part after :: for another file; rename it"):
        find_source(str(tmp_path / name))


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": CHAT, "source": "x"}, CHAT),
        ({"prompt": "1 + 1 =", "completion": " 2"}, "1 + 1 = 2"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, CHAT),
        ({"text": "x", "messages": CHAT}, "x"),
        ({"text": CHAT}, CHAT),
        ({"messages": None}, ""),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
            CHAT[:1],
        ),
    ],
)
def test_conversations_and_completions_are_read_by_the_names_that_datasets_give_them(tmp_path, kind, record, expected):
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text(json.dumps(record) + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    (document,) = read(path)
    assert (document if isinstance(document, str) else list(document.messages)) == expected


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        ({"messages": "hi"}, None),
        ({"messages": [{"content": "hi"}]}, "field 'messages' is list, not text nor a list of messages with a role"),
        ({"messages": ["hi"]}, "field 'messages' is list.*and content or tool_calls; make it one"),
        ({"messages": [{"from": "human", "value": "hi"}]}, "have from and value, as ShareGPT's: write from as role"),
        ({"prompt": CHAT, "completion": "x"}, "of prompt and completion one is text and .*make both text, or both"),
        ({"prompt": "x", "completion": CHAT}, "of prompt and completion one is text and .*make both text, or both"),
        ({"prompt": CHAT, "completion": 3}, "field 'completion' is int, not text nor"),
        ({"prompt": "x"}, "no field 'text', nor messages, nor prompt and completion.*need each other; add the missing"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, "rename conversations to messages, and write from as"),
        ({"body": "x"}, "name the one that holds the text with --text_field .there are: body"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "is list with more than text; remove"),
        ({"messages": [{"role": "user", "content": 4}]}, "is int with more than text"),
    ],
)
def test_a_field_without_text_is_named_with_its_record(tmp_path, record, cause):
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    if cause is None:
        assert read(tmp_path / "a.jsonl") == ["hi"]
        return
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 1: .*({cause})"):
        read(tmp_path / "a.jsonl")


def test_files_that_lie_here_are_read_without_asking_anybody(tmp_path, monkeypatch):
    """`datasets` would count the call by a request, and wait for it."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr(datasets.load, "get_session", lambda: pytest.fail("a request to the hub"))
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    rows = load_rows("text", data_files=str(tmp_path / "a.txt"), split="train", streaming=True)
    assert [row["text"] for row in rows] == ["one", "two"]
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
