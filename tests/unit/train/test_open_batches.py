"""Windows that a run reads, from its flags."""

from __future__ import annotations

import numpy as np
import pytest

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.data.stream_chunks import ChunkSizes
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train import open_batches
from sparseforge_ds.train.spec import make_spec
from tests.tiny_folders import deepspeed_json, write_json, write_model
from tests.tiny_streams import row_of, texts, write_stream

SEQ = 16


def windows_of(row):
    return {tuple(row[start : start + SEQ]) for start in range(0, len(row), SEQ)}


def test_a_mixture_is_framed_as_asked_and_not_continued_otherwise(tmp_path, monkeypatch):
    """Frame a text that is tokenized before and one that another process tokenizes."""
    # Small chunks, so that the stream has several.
    monkeypatch.setattr(open_batches, "ChunkSizes", lambda seq_length: ChunkSizes(seq_length, 64 * SEQ, 64 * SEQ))
    for name in ("whole", "stream"):
        write_stream(tmp_path / name)
    model = write_model(tmp_path / "model")
    config = write_json(tmp_path / "ds.json", deepspeed_json())
    states = {}
    for frame in ("both", "auto"):
        arguments = RunArguments(
            deepspeed=str(config),
            model=str(model),
            dataset=[str(tmp_path / "whole"), f"stream:{tmp_path / 'stream'}"],
            seq_length=SEQ,
            output_dir=str(tmp_path / "run"),
            document_frame=frame,
        )
        spec = make_spec(arguments, 1)
        batches = open_batches.open_batches(spec, Ranks())
        # Both sources are framed alike.
        cached, stream = batches.sources
        stream.prepare(0, 64)
        streamed = {tuple(np.asarray(stream.window(i)).tolist()) for i in range(64)}
        stream.producer.close()
        assert streamed == windows_of(row_of(texts(), 64 * SEQ, frame))
        assert cached.token.tolist() == row_of(texts(), len(cached.token), frame)
        states[frame] = batches.state_dict()
    # Another frame makes other data, which a resumed run must not read.
    with pytest.raises(ValueError, match="other data .*--document_frame"):
        batches.load_state_dict(states["both"])
