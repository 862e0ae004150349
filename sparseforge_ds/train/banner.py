"""The banner of a run, on one screen: model, coverage, schedule, batch and memory per rank."""

from __future__ import annotations

from collections.abc import Iterable

from sparseforge_ds.config import LowRankConfig, QuantizeConfig
from sparseforge_ds.config.batch import batch_line
from sparseforge_ds.config.methods import RefreshedMaskConfig
from sparseforge_ds.data.mixture import file_lines
from sparseforge_ds.data.tokenization import frame_tokens
from sparseforge_ds.model.any_family import few_pruned, pasteable
from sparseforge_ds.model.family_table import FAMILIES
from sparseforge_ds.train.lasting_memory import lasting
from sparseforge_ds.train.spec import RunSpec

Row = tuple[str, str]


def banner(spec: RunSpec, text: str) -> str:
    """Return the banner; `text` describes the text that the run reads."""
    *rows, output = spec_rows(spec)
    rows.append(("text", text))
    # Name the source of each line of files where there are several sources.
    sources = spec.text.sources
    if lines := [
        f"{source.name}: {line}" if len(sources) > 1 else line for source in sources for line in file_lines(source)
    ]:
        rows.append(("files", "\n".join(lines)))
    # Show the tokens around a document.
    front, behind = (
        spec.model.tokenizer.convert_ids_to_tokens(list(ids))
        for ids in frame_tokens(spec.model.tokenizer, spec.arguments.document_frame)
    )
    attention = ", attention inside each" if spec.arguments.document_attention else ""
    rows.append(("documents", f"each as {' '.join([*front, '...', *behind])}{attention}"))
    return layout_rows([*rows, output])


def spec_rows(spec: RunSpec) -> list[Row]:
    """Return names and contents of the banner's lines, except those about text; the last is the output folder."""
    config = spec.config
    arguments = spec.arguments
    coverage = spec.coverage
    schedule = config.resolved_schedule
    batch = spec.deepspeed
    by_layers = arguments.any_family and spec.model.config.model_type not in FAMILIES
    warning = few_pruned(coverage) if by_layers and not spec.has_own_globs else None
    # Bytes that an offload option moves to the host count too: they are the rank's memory on the host then.
    memory = lasting(spec.sizes, spec.memory_settings, spec.teacher_sizes)
    kinds = ", ".join(f"{name} {readable_bytes(size)}" for name, size in memory.items())
    # A row in a starred list is there only where the run has such a thing.
    return [
        ("model", f"{spec.model.name} ({spec.model.config.model_type}, {coverage.total:,} parameters)"),
        ("teacher", spec.teacher.name if spec.teacher else spec.arguments.teacher_logits or "none"),
        (
            "pruned",
            f"{config.pattern} in {coverage.weights} weights: {coverage}",
        ),
        *([] if warning is None else [("warning", warning)]),
        *([("any_family", pasteable(config))] if by_layers else []),
        *(("left dense", line) for line in coverage.lines(but={line.partition(" (")[0] for line in spec.uncovered})),
        *(("not covered", f"{line}: stays dense; no row of the family table names it") for line in spec.uncovered),
        *(("allow_dense", line) for line in spec.unneeded),
        ("mask", _mask_line(spec)),
        (
            "schedule",
            ", ".join(f"{name} {start}-{stop}" for name, start, stop in schedule.phases(spec.steps) if stop > start),
        ),
        *_longer_line(spec),
        *([("low rank", _branch_line(config.low_rank))] if config.low_rank else []),
        *([("quantize", _quantize_line(config.quantize, config.quantize_step))] if config.quantize else []),
        ("rate", str(spec.learning_rate)),
        (
            "batch",
            f"{batch['train_batch_size']} x {arguments.seq_length} tokens = {batch_line(batch, spec.world_size)}",
        ),
        ("deepspeed", f"ZeRO-{spec.stage}, {str(spec.dtype).removeprefix('torch.')}"),
        ("memory", f"about {readable_bytes(sum(memory.values()))} a rank before activations: {kinds}"),
        ("output", str(spec.folder)),
    ]


def layout_rows(rows: Iterable[Row]) -> str:
    """Lay out rows as text: names in a column, contents beside it."""
    lines = list(rows)
    width = max(len(name) for name, _ in lines)
    indent = "\n" + " " * (width + 4)
    return "\n".join(f"  {name:<{width}}  {content}".replace("\n", indent) for name, content in lines)


def _mask_line(spec: RunSpec) -> str:
    """Describe the method, and the importance by which it chooses a mask."""
    config = spec.config
    method = config.method
    if (block_start := config.start) is not None:
        tokens = block_start.tokens_of(config.max_steps * spec.tokens_per_step)
        readers = spec.world_size // spec.sequence_parallel
        passes = block_start.passes(tokens, spec.arguments.seq_length, readers)
        # Without a name, blocks with experts in one weight have other masks than the rest (`start.first_mask`).
        masks = "" if block_start.mask is None else f" by {block_start.mask}"
        moves = "" if config.soft is None else f", then an update every {config.resolved_schedule.update_every} steps"
        return (
            f"method {method.name}, a block-wise start{masks}, every block trained {passes} times on "
            f"{tokens:,} tokens{moves}"
        )
    if method.name == "sparseforge":
        return f"importance {config.importance}, an update every {config.resolved_schedule.update_every} steps"
    line = f"method {method.name}"
    if "importance" in method.reads:
        line += f", starting mask by {config.importance}"
    if isinstance(method, RefreshedMaskConfig):
        line += f", chosen anew every {method.every} steps, decay {method.decay:g}"
    return line


def _longer_line(spec: RunSpec) -> list[Row]:
    """Return a row for a run that is longer than its schedules."""
    scheduled = spec.config.max_steps
    if spec.steps == scheduled:
        return []
    line = f"laid out over {scheduled} steps; the finetune goes on to {spec.steps} at the rate of step {scheduled}"
    return [("longer", line)]


def _branch_line(branch: LowRankConfig) -> str:
    if branch.learned:
        return f"a learned branch, a number for {branch.k} weights"
    return f"SLoRB, a number for {branch.k} inputs of a pruned weight's output"


def _quantize_line(settings: QuantizeConfig, step: int) -> str:
    shared = (
        "all inputs of an output" if settings.group_size is None else f"{settings.group_size} kept weights of an output"
    )
    return f"{settings.bits} bits from step {step} on, a scale for {shared}"


def readable_bytes(size: float) -> str:
    """Return a size for people: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
