"""The text of a run as tokens: packed whole before training starts, or a stream that is tokenised as it is read."""

from __future__ import annotations

from sparseforge_ds.data.batches import Batches, Layout, PackedWindows, Windows
from sparseforge_ds.data.chunks import Sizes
from sparseforge_ds.data.documents import Documents, Stream
from sparseforge_ds.data.mixed_windows import Mixed, MixedWindows
from sparseforge_ds.data.mixture import Mixture
from sparseforge_ds.data.packing import Packed, pack
from sparseforge_ds.data.streaming import Streamed, open_stream, plan_stream
from sparseforge_ds.train.ranks import Ranks
from sparseforge_ds.train.spec import RunSpec


def pack_text(spec: RunSpec, ranks: Ranks) -> Packed | Streamed | Mixed:
    """Tokenise the text on rank 0, or find it done, and check it on every rank; of a stream, only find its name.

    Raises:
        AgreedError: the text is unreadable or does not suit the model, or the disk is full.
    """
    text = spec.documents
    if not isinstance(text, Mixture):
        return _pack_source(spec, ranks, text, _layout(spec, ranks).global_batch)
    texts = tuple(_pack_source(spec, ranks, source, 1) for source in text.sources)
    return Mixed(texts, tuple(source.name for source in text.sources), text.shares)


def make_batches(spec: RunSpec, ranks: Ranks, text: Packed | Streamed | Mixed) -> Batches:
    """The stream of this rank's micro-batches, at its beginning. Starts the tokenising of a stream.

    Raises:
        ValueError: the text is shorter than one global batch.
    """
    documents, layout = spec.documents, _layout(spec, ranks)
    windows: Windows
    if isinstance(documents, Mixture):
        assert isinstance(text, Mixed)
        pairs = zip(documents.sources, text.texts, strict=True)
        sources = [_windows(spec, ranks, source, packed, 1) for source, packed in pairs]
        windows = MixedWindows(sources, documents.parts, spec.arguments.seed)
    else:
        assert not isinstance(text, Mixed)
        windows = _windows(spec, ranks, documents, text, layout.global_batch)
    return Batches(windows, layout, spec.arguments.resume_other_data)


def _pack_source(spec: RunSpec, ranks: Ranks, source: Documents | Stream, at_least: int) -> Packed | Streamed:
    folder, frame = spec.folder / "data", spec.arguments.document_frame
    if not isinstance(source, Documents):
        stream, sizes = source, Sizes(spec.arguments.seq_length)
        return ranks.on_first(lambda: plan_stream(stream, spec.model.tokenizer, folder, sizes, frame))
    documents = source
    packed = ranks.on_first(lambda: pack(documents, spec.model.tokenizer, folder, frame))

    def check() -> None:
        if packed.largest_id >= _vocabulary(spec):
            raise ValueError(
                f"--model {spec.model.name}: its tokenizer gives token {packed.largest_id}, but the model knows "
                f"{_vocabulary(spec)}; tokenizer and weights do not belong together"
            )
        _windows(spec, ranks, documents, packed, at_least)

    ranks.all_or_raise(check)
    return packed


def _windows(
    spec: RunSpec, ranks: Ranks, source: Documents | Stream, text: Packed | Streamed, at_least: int
) -> Windows:
    arguments = spec.arguments
    if isinstance(text, Packed):
        order = (arguments.seq_length, arguments.seed)
        return PackedWindows(text.open(), text.key, *order, at_least, source.name, text.facts)
    assert not isinstance(source, Documents)
    return open_stream(text, source, spec.model.tokenizer, _vocabulary(spec), arguments.seed, ranks)


def _layout(spec: RunSpec, ranks: Ranks) -> Layout:
    return Layout(
        micro_batch=spec.deepspeed["train_micro_batch_size_per_gpu"],
        accumulation=spec.deepspeed["gradient_accumulation_steps"],
        world_size=ranks.world_size,
        rank=ranks.rank,
    )


def _vocabulary(spec: RunSpec) -> int:
    return int(spec.model.config.get_text_config().vocab_size)
