"""Batches from the text of a run: each source is tokenized before training starts, or as a stream meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sparseforge_ds.data.batches import Batches
from sparseforge_ds.data.micro_batch import BatchLayout
from sparseforge_ds.data.producer import ChunkSpec
from sparseforge_ds.data.stream_chunks import ChunkSizes
from sparseforge_ds.data.streaming import StreamedWindows
from sparseforge_ds.data.teacher_logits import TeacherLogits
from sparseforge_ds.data.text_files import TextSource
from sparseforge_ds.data.token_cache import TokenCache, ensure_token_cache
from sparseforge_ds.data.tokenization import cache_key, unknown_token_error
from sparseforge_ds.data.windows import CachedWindows, Windows
from sparseforge_ds.ranks import Ranks
from sparseforge_ds.train.spec import RunSpec


def open_batches(spec: RunSpec, ranks: Ranks) -> Batches:
    """Return this rank's micro-batches, at the beginning of the text; rank 0 tokenizes what is no stream.

    Raises:
        AgreedError: the text cannot be read, does not suit the model or is too short, or the disk is full.
    """
    layout = BatchLayout(
        micro_batch=spec.deepspeed["train_micro_batch_size_per_gpu"],
        accumulation=spec.deepspeed["gradient_accumulation_steps"],
        world_size=ranks.world_size,
        rank=ranks.rank,
        sequence_parallel=spec.sequence_parallel,
    )
    at_least = layout.global_batch if len(spec.text.sources) == 1 else 1
    sources = [_open(spec, ranks, source, at_least) for source in spec.text.sources]
    logits = ranks.all_or_raise(lambda: _open_teacher_logits(spec, sources))
    return Batches(sources, spec.text.parts, layout, spec.arguments.resume_other_data, logits)


def _open_teacher_logits(spec: RunSpec, sources: Sequence[Windows]) -> list[TeacherLogits] | None:
    """Open the stored logits of every source, if the run has them."""
    folder = spec.arguments.teacher_logits
    if folder is None:
        return None
    assert spec.config.distillation is not None
    logits = []
    for windows in sources:
        assert isinstance(windows, CachedWindows)  # `find_texts` refuses streams
        vocabulary = int(spec.model.config.get_text_config().vocab_size)
        settings = (spec.arguments.seq_length, vocabulary, spec.config.distillation.temperature)
        logits.append(TeacherLogits.open(Path(folder), windows.key, windows.facts, *settings))
    # Sequences of different texts share a micro-batch.
    top_k = logits[0].record.top_k
    for windows, other in zip(sources, logits, strict=True):
        if other.record.top_k != top_k:
            raise ValueError(
                f"--teacher_logits {folder}: --top_k is {other.record.top_k} for --dataset {windows.name}, and {top_k} "
                f"for {sources[0].name}; make both alike by sparseforge teach"
            )
    return logits


def _open(spec: RunSpec, ranks: Ranks, source: TextSource, at_least: int) -> Windows:
    """Open one source; it must have `at_least` windows where it is no stream. Collective."""
    arguments = spec.arguments
    folder = spec.folder / "data"
    vocabulary = int(spec.model.config.get_text_config().vocab_size)
    tokenizer = spec.model.tokenizer
    frame = arguments.document_frame
    # A stream is tokenized while the run goes on. Rank 0 hashes its files for all ranks.
    if source.streamed:
        sizes = ChunkSizes(arguments.seq_length)
        key, facts = ranks.on_first(lambda: cache_key(source, tokenizer, frame, asdict(sizes)))
        chunks = ChunkSpec(source, tokenizer, folder / key, sizes, vocabulary, frame)
        return StreamedWindows(chunks, facts, arguments.seed, ranks)
    # Everything else is tokenized now, by rank 0, and mapped into memory by every rank.
    packed: TokenCache = ranks.on_first(lambda: ensure_token_cache(source, tokenizer, folder, frame))

    def open_packed() -> CachedWindows:
        if packed.largest_id >= vocabulary:
            raise unknown_token_error(packed.largest_id, vocabulary)
        return CachedWindows(
            packed.open(),
            packed.name,
            arguments.seq_length,
            arguments.seed,
            at_least,
            source.name,
            packed.facts,
            packed.describe(),
        )

    return ranks.all_or_raise(open_packed)
