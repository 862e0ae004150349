"""The token cache."""

from __future__ import annotations

import itertools
import os
import time

import numpy as np
import pytest

from sparseforge_ds.data.documents import Conversation
from sparseforge_ds.data.text_files import TextSource
from sparseforge_ds.data.token_cache import ensure_token_cache
from sparseforge_ds.data.tokenization import cache_key, token_dtype, tokenize
from tests.tiny_folders import byte_tokenizer

TEXTS = ["abc", "", "  \n", "de"]


class Texts(TextSource):
    name = "test"
    streamed = False

    def __init__(self, read, identity="test"):
        self.texts = read
        self.facts_of_it = {"text": identity}

    @property
    def facts(self):
        return self.facts_of_it

    def read(self, state=None):
        return iter(self.texts())


def documents(texts=TEXTS, identity="test"):
    return Texts(lambda: texts, identity)


def ids(text):
    return byte_tokenizer()(text, add_special_tokens=False)["input_ids"]


def test_every_document_starts_with_bos(tmp_path):
    packed = ensure_token_cache(documents(), byte_tokenizer(), tmp_path)
    assert packed.open().tolist() == [256, *ids("abc"), 256, *ids("de")]
    assert (packed.tokens, packed.documents, packed.largest_id, packed.dtype) == (7, 2, 256, "uint16")


def test_without_bos_every_document_ends_with_eos(tmp_path):
    packed = ensure_token_cache(documents(), byte_tokenizer(bos=False), tmp_path)
    assert packed.open().tolist() == [*ids("abc"), 257, *ids("de"), 257]


@pytest.mark.parametrize(
    ("bos", "frame", "expected"),
    [
        (True, "bos", [256, *b"abc", 256, *b"de"]),
        (True, "eos", [*b"abc", 257, *b"de", 257]),
        (True, "both", [256, *b"abc", 257, 256, *b"de", 257]),
        (False, "eos", [*b"abc", 257, *b"de", 257]),
    ],
)
def test_documents_are_framed_as_asked(tmp_path, bos, frame, expected):
    """`auto` shares its cache with the frame that it stands for, and with no other."""
    tokenizer = byte_tokenizer(bos)
    letter = dict(zip(ids("abcde"), b"abcde", strict=True))
    usual = ensure_token_cache(documents(), tokenizer, tmp_path)
    packed = ensure_token_cache(documents(), tokenizer, tmp_path, frame)
    assert [letter.get(token, token) for token in packed.open().tolist()] == expected
    assert (packed == usual) == (packed.open().tolist() == usual.open().tolist())
    assert packed.largest_id == (256 if frame == "bos" else 257)


def test_every_frame_has_a_cache_of_its_own(tmp_path):
    keys = [
        ensure_token_cache(documents(), byte_tokenizer(), tmp_path, frame).key
        for frame in ("auto", "bos", "eos", "both")
    ]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_one_token_for_both_ends_stands_in_front_or_behind(tmp_path):
    """Put the token where GPT-2 and OPT have it."""
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    assert ensure_token_cache(documents(), tokenizer, tmp_path).open().tolist() == [257, *ids("abc"), 257, *ids("de")]
    behind = ensure_token_cache(documents(), tokenizer, tmp_path, "eos")
    assert behind.open().tolist() == [*ids("abc"), 257, *ids("de"), 257]
    with pytest.raises(ValueError, match="--document_frame both: .* one token .*</s>.*; use bos or eos"):
        ensure_token_cache(documents(), tokenizer, tmp_path, "both")


@pytest.mark.parametrize(
    ("missing", "frame", "cure"),
    [("bos", "bos", "eos"), ("bos", "both", "eos"), ("eos", "eos", "bos"), ("eos", "both", "bos")],
)
def test_a_frame_that_the_tokenizer_does_not_have_is_refused(tmp_path, missing, frame, cure):
    tokenizer = byte_tokenizer()
    setattr(tokenizer, f"{missing}_token", None)
    with pytest.raises(ValueError, match=f"--document_frame {frame}: .* no {missing.upper()} token; use {cure}, or"):
        ensure_token_cache(documents(), tokenizer, tmp_path, frame)
    assert list(tmp_path.iterdir()) == []


def test_a_large_vocabulary_takes_32_bits(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<extra {i}>" for i in range(2**16)])
    packed = ensure_token_cache(documents(["a<extra 65535>"]), tokenizer, tmp_path)
    assert packed.dtype == "uint32"
    assert packed.open().tolist()[-1] == packed.largest_id == 258 + 65535


def test_a_finished_cache_is_used_and_another_text_is_not_confused_with_it(tmp_path):
    first = ensure_token_cache(documents(), byte_tokenizer(), tmp_path)
    unread = documents(itertools.repeat("never read"))
    assert ensure_token_cache(unread, byte_tokenizer(), tmp_path) == first
    other = ensure_token_cache(documents(["xyz"], identity="other"), byte_tokenizer(), tmp_path)
    assert other.key != first.key
    assert ensure_token_cache(documents(), byte_tokenizer(bos=False), tmp_path).key not in (first.key, other.key)


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        (".bin", lambda content: content[:-2], "has 12 bytes instead of 14"),
        (".bin", lambda content: content[::-1], "has other bytes in block 0 than were written"),
        (".bin", lambda content: b"\xff" * len(content), "has other bytes in block 0 than were written"),
        (".json", lambda content: content[:40], "is damaged (JSONDecodeError"),
        (".json", lambda content: content.replace(b"checksums", b"of_others"), "is damaged (TypeError"),
        (".json", lambda content: content.replace(b'"tokens"', b'"tokenz"'), "is damaged (TypeError"),
        (".json", lambda content: b"[" * 100_000, "is damaged (RecursionError"),
    ],
)
def test_a_cache_that_is_not_as_it_was_written_is_made_again(tmp_path, caplog, suffix, damage, message):
    packed = ensure_token_cache(documents(), byte_tokenizer(), tmp_path)
    (file,) = tmp_path.glob(f"*{suffix}")
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert ensure_token_cache(documents(), byte_tokenizer(), tmp_path) == packed
    assert file.read_bytes() == good
    assert len(caplog.messages) == 1 and message in caplog.messages[0], caplog.messages
    assert ensure_token_cache(documents([]), byte_tokenizer(), tmp_path) == packed, "and then taken as it is"


def test_one_wrong_byte_of_a_large_cache_is_found(tmp_path, monkeypatch):
    """Compare all blocks of a file while there are few."""
    monkeypatch.setattr("sparseforge_ds.data.token_cache.CHECKSUM_BLOCK", 64)
    text = [f"document {number}" for number in range(40)]
    packed = ensure_token_cache(documents(text), byte_tokenizer(), tmp_path)
    (file,) = tmp_path.glob("*.bin")
    good = file.read_bytes()
    for position in (0, 700, len(good) - 1):
        content = bytearray(good)
        content[position] ^= 1
        file.write_bytes(content)
        assert ensure_token_cache(documents(text), byte_tokenizer(), tmp_path) == packed and file.read_bytes() == good


def test_a_moved_cache_is_found_where_it_is(tmp_path):
    ensure_token_cache(documents(), byte_tokenizer(), tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    packed = ensure_token_cache(documents(), byte_tokenizer(), tmp_path / "b")
    assert len(packed.open()) == 7


def test_documents_without_text_are_counted(tmp_path):
    packed = ensure_token_cache(documents(), byte_tokenizer(), tmp_path)
    assert packed.skipped == 2
    assert packed.describe() == "2 documents (2 without text were skipped), "
    assert ensure_token_cache(documents(), byte_tokenizer(), tmp_path).skipped == 2


@pytest.mark.parametrize("texts", [[], [""], ["", " \n"] * 300])
def test_a_text_without_any_text_is_refused(tmp_path, texts):
    with pytest.raises(ValueError, match=rf"--dataset test: there is no text in it \({len(texts)} documents"):
        ensure_token_cache(documents(texts), byte_tokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_the_text_is_bad(tmp_path):
    def broken():
        yield "fine"
        raise ValueError("line 2: not JSON")

    with pytest.raises(ValueError, match="line 2"):
        ensure_token_cache(Texts(broken), byte_tokenizer(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_cannot_separate_documents_is_refused(tmp_path):
    tokenizer = byte_tokenizer(bos=False)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a BOS nor an EOS"):
        ensure_token_cache(documents(), tokenizer, tmp_path)


def test_a_cache_that_this_machine_cannot_see_says_so(tmp_path):
    packed = ensure_token_cache(documents(), byte_tokenizer(), tmp_path)
    next(tmp_path.glob("*.bin")).unlink()
    with pytest.raises(ValueError, match="all machines of the run share"):
        packed.open()


def test_ids_survive_the_file(tmp_path):
    text = "".join(map(chr, range(32, 1000)))
    packed = ensure_token_cache(documents([text]), byte_tokenizer(), tmp_path)
    assert np.array_equal(packed.open(), [256, *ids(text)])


def test_two_runs_fill_one_folder_at_once(tmp_path):
    """`sparseforge compare` starts runs side by side; the second tokenizes while the first is half done."""
    inner = []

    def read():
        if not inner:
            inner.append(None)  # the other run reads the text itself
            inner[0] = ensure_token_cache(documents(), byte_tokenizer(), tmp_path)
        yield from TEXTS

    packed = ensure_token_cache(Texts(read), byte_tokenizer(), tmp_path)
    assert packed == inner[0]  # which did not take the other's file for a dead run's
    assert packed.open().tolist() == [256, *ids("abc"), 256, *ids("de")]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".json"]


def test_what_a_killed_run_left_is_removed(tmp_path):
    for name, age in (("old.0123abcd.tmp", 3600), ("of_a_living_run.0123abcd.tmp", 0)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    ensure_token_cache(documents(), byte_tokenizer(), tmp_path)
    assert [path.name for path in tmp_path.glob("*.tmp")] == ["of_a_living_run.0123abcd.tmp"]


def test_half_a_character_becomes_a_replacement(tmp_path):
    packed = ensure_token_cache(documents(["a\ud83db", "\N{GRINNING FACE}"]), byte_tokenizer(), tmp_path)
    assert packed.open().tolist() == [256, *ids("a\N{REPLACEMENT CHARACTER}b"), 256, *ids("\N{GRINNING FACE}")]


TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
)


def chat(*roles):
    return Conversation(tuple({"role": role, "content": "hi"} for role in roles), "a.jsonl, line 3")


def test_conversations_are_framed_by_the_chat_template_alone(tmp_path):
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="a.jsonl, line 3: is a conversation, and the tokenizer has no chat"):
        ensure_token_cache(documents([chat("user")]), tokenizer, tmp_path)
    tokenizer.chat_template = TEMPLATE
    packed = ensure_token_cache(
        documents(["abc", chat("user", "assistant"), Conversation((), "x")]), tokenizer, tmp_path
    )
    assert packed.open().tolist() == [256, *ids("abc"), *ids("<user>hi"), 257, *ids("<assistant>hi"), 257]
    assert (packed.documents, packed.skipped) == (2, 1)
    with pytest.raises(ValueError, match="line 3: the tokenizer's chat template refuses the conversation .no critics"):
        ensure_token_cache(documents([chat("critic")], "other"), tokenizer, tmp_path)
    tokenizer.chat_template = "{% for message in messages %}{{ message.role + message.level }}{% endfor %}"
    number = Conversation(({"role": "user", "content": "hi", "level": 3},), "a.jsonl, line 4")
    with pytest.raises(ValueError, match="line 4: the tokenizer's chat template refuses the conversation .can only"):
        ensure_token_cache(documents([number], "number"), tokenizer, tmp_path)
    for failing in ("1 / 0", "messages[0].content.index('x')", "'%c' % -1"):
        tokenizer.chat_template = "{{" + failing + "}}"
        with pytest.raises(ValueError, match=r"line 3: the tokenizer's chat template refuses .*repair the template"):
            tokenize([chat("user")], tokenizer)
    tokenizer.chat_template = {"rag": TEMPLATE, "tool_use": TEMPLATE}
    with pytest.raises(ValueError, match=r"line 3: .*, and none of the .* \(rag, tool_use\) is the default; put one"):
        tokenize([chat("user")], tokenizer)
    tokenizer.chat_template = TEMPLATE.upper()
    assert cache_key(documents(), tokenizer)[0] != packed.key, "another template is another text"


def test_other_tokens_of_equal_settings_have_another_name(tmp_path):
    """A template that chooses at random gives them, and positions and a teacher's logits are of one text."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ range(10**5) | random }}{{ messages[0].content }}"
    conversation = Conversation(({"role": "user", "content": "hi"},), "a.jsonl, line 1")
    first, second = (ensure_token_cache(documents([conversation]), tokenizer, tmp_path / out) for out in "ab")
    again = ensure_token_cache(documents([conversation]), tokenizer, tmp_path / "a")
    assert first.key == second.key and first.open().tolist() != second.open().tolist()
    assert first.name != second.name and first.facts["tokens"] != second.facts["tokens"]
    assert (again.name, again.facts) == (first.name, first.facts)


def test_ids_with_gaps_have_room():
    tokenizer = byte_tokenizer()
    assert token_dtype(tokenizer) == "uint16"
    tokenizer.get_vocab = lambda: {"a": 1, "b": 2**16}
    assert token_dtype(tokenizer) == "uint32"
