"""How many optimizer steps a run has: those of `--epochs`, or more than it was laid out over."""

from __future__ import annotations

import dataclasses
import math

from sparseforge_ds.checkpoint.folder import checkpoint_step, list_checkpoints, read_json
from sparseforge_ds.config.run_state import RunState
from sparseforge_ds.data.token_cache import ensure_token_cache
from sparseforge_ds.train.run_folder import check_beginning
from sparseforge_ds.train.spec import RunSpec


def steps_of_epochs(spec: RunSpec) -> int:
    """Steps in which a run reads its text `--epochs` times; tokenises it. Rank 0 only.

    Raises:
        ValueError: the text has no end that is known now, several sources with an end each, or cannot be read; or the
            folder holds another run, or none to resume.
        OSError: the disk is full.
    """
    epochs, sources = spec.arguments.epochs, spec.text.sources
    assert epochs is not None
    if len(sources) > 1 or sources[0].streamed:
        names = " ".join(source.name for source in sources)
        why = "sources of a mixture end at different times" if len(sources) > 1 else "the length of a stream is unknown"
        raise ValueError(f"--epochs {epochs:g}: {why} (--dataset {names}); give --max_steps")
    recorded = (spec.folder / "sparseforge.json").exists()
    if not spec.arguments.resume or (spec.arguments.resume != "auto" and not recorded):
        check_beginning(spec)
    packed = ensure_token_cache(sources[0], spec.model.tokenizer, spec.folder / "data", spec.arguments.document_frame)
    windows = packed.tokens // spec.arguments.seq_length
    return max(1, math.ceil(epochs * windows / int(spec.deepspeed["train_batch_size"])))


def scheduled_steps_of_saved_run(spec: RunSpec) -> int | None:
    """The `max_steps` over which the run to be resumed was laid out, where `spec` makes it longer; else None.

    Only a run with a frozen mask can become longer: the schedule of the mask, in fractions of `max_steps`, is over.

    Raises:
        ValueError: it is beyond `spec`'s steps already, or its learning rate has come down to 0.
    """
    saved, record = list_checkpoints(spec.folder / "checkpoints"), spec.folder / "sparseforge.json"
    if not spec.arguments.resume or not saved or not record.is_file():
        return None
    try:
        before = RunState.parse({"step": 0, "refreshes": 0, **read_json(record)}, str(record)).config
    except ValueError:
        return None  # `check_beginning` says what is wrong
    steps, reached = spec.config.max_steps, checkpoint_step(saved[-1])
    if before.max_steps <= steps < reached:
        raise ValueError(
            f"--max_steps {steps}: the run in {spec.folder} is already at step {reached}; give more to go on, or "
            "move its newer checkpoints away to go back"
        )
    if not before.max_steps < steps or reached < before.release_step:
        return None
    if spec.arguments.min_lr_ratio == 0:
        raise ValueError(
            f"--max_steps {steps}: the learning rate of the run in {spec.folder} ends at 0 at step "
            f"{before.max_steps}, so that more steps would change nothing; give --min_lr_ratio, like 0.1"
        )
    return before.max_steps


def with_more_steps(spec: RunSpec, laid_out: int) -> RunSpec:
    """The run of `spec`'s steps whose schedules stay those of one of `laid_out` steps."""
    config = dataclasses.replace(spec.config, max_steps=laid_out)
    deepspeed = {**spec.deepspeed, "sparseforge": config.to_dict()}
    return dataclasses.replace(spec, config=config, deepspeed=deepspeed, steps=spec.config.max_steps)
