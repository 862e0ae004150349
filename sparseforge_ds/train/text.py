"""The text of a run as tokens: packed whole before training starts, or a stream that is tokenised as it is read."""

from __future__ import annotations

from sparseforge_ds.train.chunks import Sizes
from sparseforge_ds.train.data import Batches, Layout, PackedWindows, Windows
from sparseforge_ds.train.documents import Documents
from sparseforge_ds.train.packing import Packed, pack
from sparseforge_ds.train.plan import Plan
from sparseforge_ds.train.ranks import Ranks
from sparseforge_ds.train.streaming import Streamed, StreamedWindows, open_stream, plan_stream


def pack_text(plan: Plan, ranks: Ranks) -> Packed | Streamed:
    """Tokenise the text on rank 0, or find it done, and check it on every rank; of a stream, only find its name.

    Raises:
        AgreedError: the text is unreadable or does not suit the model, or the disk is full.
    """
    documents, folder = plan.documents, plan.folder / "data"
    if not isinstance(documents, Documents):
        stream, sizes = documents, Sizes(plan.arguments.seq_length)
        return ranks.on_first(lambda: plan_stream(stream, plan.tokenizer, folder, sizes))
    packed = ranks.on_first(lambda: pack(documents, plan.tokenizer, folder))

    def check() -> None:
        if packed.largest_id >= _vocabulary(plan):
            raise ValueError(
                f"--model {plan.model.name}: its tokenizer gives token {packed.largest_id}, but the model knows "
                f"{_vocabulary(plan)}; tokenizer and weights do not belong together"
            )
        _packed_windows(plan, ranks, packed)

    ranks.everywhere(check)
    return packed


def make_batches(plan: Plan, ranks: Ranks, text: Packed | Streamed) -> Batches:
    """The stream of this rank's micro-batches, at its beginning. Starts the tokenising of a stream.

    Raises:
        ValueError: the text is shorter than one global batch.
    """
    windows: Windows = _packed_windows(plan, ranks, text) if isinstance(text, Packed) else _stream(plan, ranks, text)
    return Batches(windows, _layout(plan, ranks))


def _packed_windows(plan: Plan, ranks: Ranks, packed: Packed) -> PackedWindows:
    arguments, at_least = plan.arguments, _layout(plan, ranks).global_batch
    return PackedWindows(packed.open(), packed.key, arguments.seq_length, arguments.seed, at_least)


def _stream(plan: Plan, ranks: Ranks, streamed: Streamed) -> StreamedWindows:
    assert not isinstance(plan.documents, Documents)
    return open_stream(streamed, plan.documents, plan.tokenizer, _vocabulary(plan), plan.arguments.seed, ranks)


def _layout(plan: Plan, ranks: Ranks) -> Layout:
    return Layout(
        micro_batch=plan.deepspeed["train_micro_batch_size_per_gpu"],
        accumulation=plan.deepspeed["gradient_accumulation_steps"],
        world_size=ranks.world_size,
        rank=ranks.rank,
    )


def _vocabulary(plan: Plan) -> int:
    return int(plan.model.config.get_text_config().vocab_size)
