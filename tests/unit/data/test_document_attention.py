"""`--document_attention`: where documents begin, from a record to the positions and labels of a micro-batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.data.batches import Batches, make_micro_batch
from sparseforge_ds.data.micro_batch import IGNORED, BatchLayout
from sparseforge_ds.data.mixture import find_source
from sparseforge_ds.data.producer import ChunkSpec, ChunkWriter
from sparseforge_ds.data.text_files import TextOptions
from sparseforge_ds.data.token_cache import ensure_token_cache
from sparseforge_ds.data.windows import CachedWindows, document_starts, ids_of_tokens, trained_flags
from sparseforge_ds.ranks import AgreedError, Ranks
from sparseforge_ds.train.open_batches import open_batches
from sparseforge_ds.train.spec import make_spec
from tests.tiny_folders import byte_tokenizer, deepspeed_json, write_json, write_model
from tests.tiny_streams import SIZES

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>{{ m.content }}{% else %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% endif %}{% endfor %}"
)
"""Puts the document's frame around every turn, so that these tokens do not tell documents apart."""
CHAT = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "bc")) * 2]
RECORDS = [{"text": "xy"}, {"messages": CHAT}, {"prompt": "p", "completion": "qr"}, {"text": ""}, {"text": "z"}]


def write(path: Path, records: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def shown(token: np.ndarray) -> str:
    """Put a bar in front of each document, and upper case for what is trained on; <s> is S and </s> is E."""
    first = document_starts(token)
    trained = trained_flags(token)
    assert first is not None
    letters = [
        {256: "s", 257: "e"}.get(int(number)) or byte_tokenizer().decode([number]) for number in ids_of_tokens(token)
    ]
    return "".join(
        "|" * bool(new) + (letter.upper() if own else letter)
        for letter, new, own in zip(letters, first, trained, strict=True)
    )


@pytest.mark.parametrize(
    ("loss_on", "frame", "expected"),
    [
        ("all", "auto", "|sXY|sABCESABCE|sPQR|sZ"),
        ("all", "eos", "|xYE|sABCESABCE|pQRE|zE"),
        ("completion", "auto", "|saBCEsaBCE|spQR"),
    ],
)
def test_documents_of_every_kind_begin_where_they_begin(tmp_path, loss_on, frame, expected):
    """Not where a token stands that frames documents, which a template may repeat; and in a stream alike."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    path = write(tmp_path / "a.jsonl", RECORDS if loss_on == "all" else RECORDS[1:3])
    options = {"loss_on": loss_on, "document_attention": True}
    packed = ensure_token_cache(find_source(path, TextOptions(**options)), tokenizer, tmp_path / "data", frame)
    assert shown(packed.open()) == expected
    assert packed.dtype == "uint16,?,?" and packed.trained == sum(letter.isupper() for letter in expected)
    stream = ChunkSpec(
        find_source(f"stream:{path}", TextOptions(**options)), tokenizer, tmp_path / "chunks", SIZES, 264, frame
    )
    writer = ChunkWriter(stream)
    writer.write_next()
    row = writer.chunks.open(0)
    assert shown(row) == (expected * 10)[: len(shown(row))]


def test_positions_begin_anew_and_nothing_predicts_a_first_token():
    token = np.zeros((2, 6), dtype="uint16,?,?")
    token["f0"] = np.arange(12).reshape(2, 6)
    token["f2"] = [[0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 1]]  # the first window begins inside a document
    token["f1"] = ~token["f2"]
    batch = make_micro_batch(token, 3.0)
    assert batch.extra_inputs["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 0]]
    assert batch.label_BS.tolist() == [[0, 1, IGNORED, IGNORED, 4, 5], [IGNORED, 7, 8, 9, 10, IGNORED]]
    assert batch.inputs.keys() == {"input_ids", "position_ids"} and batch.trained == 3.0
    parts = [batch.take_tokens(slice(3 * part, 3 * part + 3), 2) for part in range(2)]
    positions = [part.extra_inputs["position_ids"].tolist() for part in parts]
    assert positions == [[[0, 1, 0], [0, 1, 2]], [[0, 1, 2], [3, 4, 0]]]
    assert "position_ids" in batch.to("cpu").extra_inputs
    assert make_micro_batch(token["f0"], None).extra_inputs == {}


def test_documents_of_one_token_are_nothing_to_train_on():
    token = np.zeros(40, dtype="uint16,?,?")
    token["f2"] = True
    stream = Batches([CachedWindows(token, "text", 10, 0, 1)], [1], BatchLayout(2, 1, 1, 0))
    with pytest.raises(AgreedError, match="--document_attention: no token of the run's sequences 0 to 1 is trained on"):
        stream.prepare_step()


def test_a_run_is_not_continued_with_the_other_attention(tmp_path):
    text = write(tmp_path / "a.jsonl", [{"text": f"document {i}"} for i in range(40)])
    model = write_model(tmp_path / "model")
    config = write_json(tmp_path / "ds.json", deepspeed_json())
    states = {}
    for document_attention in (True, False):
        arguments = RunArguments(
            deepspeed=str(config),
            model=str(model),
            dataset=[text, f"stream:{write(tmp_path / 'b.jsonl', [{'text': 'b'}])}"],
            seq_length=16,
            output_dir=str(tmp_path / "run"),
            document_attention=document_attention,
        )
        batches = open_batches(make_spec(arguments, 1), Ranks())
        states[document_attention] = batches.state_dict()
    with pytest.raises(ValueError, match="other data .*--document_attention was true, is false"):
        batches.load_state_dict(states[True])
