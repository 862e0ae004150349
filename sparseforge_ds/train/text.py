"""The text of a run as tokens: packed whole before training starts, or a stream that is tokenised as it is read."""

from __future__ import annotations

from sparseforge_ds.data.batches import Batches, Layout, PackedWindows, Windows
from sparseforge_ds.data.chunks import Sizes
from sparseforge_ds.data.documents import Documents, Stream
from sparseforge_ds.data.mixed_windows import Mixed, MixedWindows
from sparseforge_ds.data.mixture import Mixture
from sparseforge_ds.data.packing import Packed, pack
from sparseforge_ds.data.streaming import Streamed, open_stream, plan_stream
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.plan import Plan


def pack_text(plan: Plan, ranks: Ranks) -> Packed | Streamed | Mixed:
    """Tokenise the text on rank 0, or find it done, and check it on every rank; of a stream, only find its name.

    Raises:
        AgreedError: the text is unreadable or does not suit the model, or the disk is full.
    """
    text = plan.documents
    if not isinstance(text, Mixture):
        return _pack_source(plan, ranks, text, _layout(plan, ranks).global_batch)
    texts = tuple(_pack_source(plan, ranks, source, 1) for source in text.sources)
    return Mixed(texts, tuple(source.name for source in text.sources), text.shares)


def make_batches(plan: Plan, ranks: Ranks, text: Packed | Streamed | Mixed) -> Batches:
    """The stream of this rank's micro-batches, at its beginning. Starts the tokenising of a stream.

    Raises:
        ValueError: the text is shorter than one global batch.
    """
    documents, layout = plan.documents, _layout(plan, ranks)
    windows: Windows
    if isinstance(documents, Mixture):
        assert isinstance(text, Mixed)
        pairs = zip(documents.sources, text.texts, strict=True)
        sources = [_windows(plan, ranks, source, packed, 1) for source, packed in pairs]
        windows = MixedWindows(sources, documents.parts, plan.arguments.seed)
    else:
        assert not isinstance(text, Mixed)
        windows = _windows(plan, ranks, documents, text, layout.global_batch)
    return Batches(windows, layout, plan.arguments.resume_other_data)


def _pack_source(plan: Plan, ranks: Ranks, source: Documents | Stream, at_least: int) -> Packed | Streamed:
    folder, frame = plan.folder / "data", plan.arguments.document_frame
    if not isinstance(source, Documents):
        stream, sizes = source, Sizes(plan.arguments.seq_length)
        return ranks.on_first(lambda: plan_stream(stream, plan.tokenizer, folder, sizes, frame))
    documents = source
    packed = ranks.on_first(lambda: pack(documents, plan.tokenizer, folder, frame))

    def check() -> None:
        if packed.largest_id >= _vocabulary(plan):
            raise ValueError(
                f"--model {plan.model.name}: its tokenizer gives token {packed.largest_id}, but the model knows "
                f"{_vocabulary(plan)}; tokenizer and weights do not belong together"
            )
        _windows(plan, ranks, documents, packed, at_least)

    ranks.all_or_raise(check)
    return packed


def _windows(plan: Plan, ranks: Ranks, source: Documents | Stream, text: Packed | Streamed, at_least: int) -> Windows:
    arguments = plan.arguments
    if isinstance(text, Packed):
        order = (arguments.seq_length, arguments.seed)
        return PackedWindows(text.open(), text.key, *order, at_least, source.name, text.facts)
    assert not isinstance(source, Documents)
    return open_stream(text, source, plan.tokenizer, _vocabulary(plan), arguments.seed, ranks)


def _layout(plan: Plan, ranks: Ranks) -> Layout:
    return Layout(
        micro_batch=plan.deepspeed["train_micro_batch_size_per_gpu"],
        accumulation=plan.deepspeed["gradient_accumulation_steps"],
        world_size=ranks.world_size,
        rank=ranks.rank,
    )


def _vocabulary(plan: Plan) -> int:
    return int(plan.model.config.get_text_config().vocab_size)
