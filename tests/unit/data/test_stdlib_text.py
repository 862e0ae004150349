"""The embedded demo text: real, deterministic, quick, and nothing shared between its splits."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparseforge_ds.data import stdlib_text
from sparseforge_ds.data.stdlib_text import is_heldout, stdlib_documents

DIGEST = """
import hashlib
from sparseforge_ds.data.stdlib_text import stdlib_documents
print(hashlib.sha256(chr(0).join(stdlib_documents("train") + stdlib_documents("heldout")).encode()).hexdigest())
"""


@pytest.fixture(autouse=True)
def fresh_cache():
    stdlib_text._corpus.cache_clear()
    yield
    stdlib_text._corpus.cache_clear()


def library(folder: Path, **sources: str) -> Path:
    """A standard library of our own; ``json__decoder`` becomes json/decoder.py."""
    for name, source in sources.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder


def test_splits_are_large_enough_and_built_quickly():
    start = time.process_time()
    train, heldout = stdlib_documents("train"), stdlib_documents("heldout")
    assert time.process_time() - start < 10
    assert sum(map(len, train)) > 1_500_000
    assert 50_000 < sum(map(len, heldout)) < 0.15 * sum(map(len, train))
    assert all(text.strip() for text in train + heldout)


def test_splits_share_no_paragraph():
    train, heldout = (
        {" ".join(part.split()) for text in stdlib_documents(split) for part in text.split("\n\n")}
        for split in ("train", "heldout")
    )
    assert not train & heldout


def test_text_is_the_same_in_every_process():
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_text_contains_topics_docstrings_with_signatures_and_comments():
    text = "\n".join(stdlib_documents("train") + stdlib_documents("heldout"))
    assert "Lambda expressions" in text
    assert "class JSONDecoder(object)\nSimple JSON <https://json.org> decoder" in text
    assert "wrap(text, width=70, **kwargs)\nWrap a single paragraph of text, returning a list of wrapped lines." in text


def test_a_document_holds_signatures_docstrings_and_comment_blocks(tmp_path):
    source = '''"""About it."""
# one line alone is no block
import os

if os:
    class Tool(dict):
        """A tool."""

        async def use(self, *, hard=True):
            """Use it.

            A tool.
            """

# Two lines
# of comment.
value = 1
'''
    documents = stdlib_text._corpus(library(tmp_path, box__tool=source))
    expected = "module box.tool\nAbout it.\n\nclass Tool(dict)\nA tool.\n\nuse(self, *, hard=True)\nUse it.\n\n"
    assert documents == (("box/tool.py", expected + "Two lines\nof comment.\n"),)


def test_tests_installed_packages_and_broken_files_are_left_out(tmp_path):
    root = library(
        tmp_path,
        good='"""Good."""',
        broken="def (",
        test__test_good='"""A test."""',
        **{"site-packages__other": '"""Another package."""', "idlelib__run": '"""IDLE."""'},
    )
    assert stdlib_text._corpus(root) == (("good.py", "module good\nGood.\n"),)


def test_topics_become_one_document_each(tmp_path):
    root = library(tmp_path, pydoc_data__topics="topics = {'b': 'Beta.\\n', 'a': 'Alpha.\\n\\nBeta.\\n'}")
    assert stdlib_text._corpus(root) == (("topic:a", "Alpha.\n\nBeta.\n"),)


def test_held_out_names_are_fixed():
    assert is_heldout("topic:customization")
    assert is_heldout("shutil.py")
    assert not is_heldout("json/decoder.py")


def test_a_library_without_sources_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib_text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="no Python sources of the standard library.*--dataset"):
        stdlib_documents("train")


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="'train' or 'heldout'"):
        stdlib_documents("test")
