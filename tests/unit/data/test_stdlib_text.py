"""The embedded demo text: the same under every Python, and nothing shared between its splits."""

from __future__ import annotations

import hashlib

from sparseforge_ds.evaluate.scored_text import iter_texts


def test_the_text_is_the_one_that_the_published_figures_were_measured_on():
    digest = {
        split: hashlib.sha256("\0".join(iter_texts(f"stdlib:{split}")).encode()).hexdigest()[:16]
        for split in ("train", "heldout")
    }
    assert digest == {"train": "66fb4c6a3c6cdf93", "heldout": "cef8d1f43a7265c5"}
    assert [len(list(iter_texts(f"stdlib:{split}"))) for split in digest] == [673, 38]


def test_splits_share_no_paragraph():
    train, heldout = (
        {" ".join(part.split()) for text in iter_texts(f"stdlib:{split}") for part in text.split("\n\n")}
        for split in ("train", "heldout")
    )
    assert not train & heldout


def test_the_text_contains_topics_and_docstrings_with_signatures_and_comments():
    text = "\n".join([*iter_texts("stdlib:train"), *iter_texts("stdlib:heldout")])
    assert "Lambda expressions" in text
    assert "class JSONDecoder(object)\nSimple JSON <https://json.org> decoder" in text
    assert "wrap(text, width=70, **kwargs)\nWrap a single paragraph of text, returning a list of wrapped lines." in text
