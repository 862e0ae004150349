"""Number of optimizer steps of a run: those of `--epochs`, or more than its schedules were made for."""

from __future__ import annotations

import dataclasses
import math

from sparseforge_ds.checkpoint.folder import checkpoint_step, list_checkpoints, read_json_object
from sparseforge_ds.config.run_state import RunState
from sparseforge_ds.config.strict import MOST
from sparseforge_ds.data.token_cache import ensure_token_cache
from sparseforge_ds.train.run_folder import check_beginning
from sparseforge_ds.train.spec import RunSpec


def steps_of_epochs(spec: RunSpec) -> int:
    """Return the steps in which a run reads its text `--epochs` times; tokenizes the text. Rank 0 only.

    Raises:
        ValueError: the text has no end that is known now, several sources with an end each, or cannot be read; the
            folder holds another run, or none to resume; or there are more steps than a run may have.
        OSError: the disk is full.
    """
    # Only a single text of known length can be read a number of times.
    epochs = spec.arguments.epochs
    sources = spec.text.sources
    assert epochs is not None
    if len(sources) > 1 or sources[0].streamed:
        names = " ".join(source.name for source in sources)
        why = "sources of a mixture end at different times" if len(sources) > 1 else "the length of a stream is unknown"
        raise ValueError(f"--epochs {epochs:g}: {why} (--dataset {names}); give --max_steps")

    # Tokenize into the run folder, but not into that of another run. Where `auto` finds no run, one begins.
    is_recorded = (spec.folder / "sparseforge.json").exists()
    arguments = spec.arguments
    if arguments.resume == "auto" and not is_recorded:
        arguments = dataclasses.replace(arguments, resume=False)
    if not arguments.resume or not is_recorded:
        check_beginning(dataclasses.replace(spec, arguments=arguments))
    packed = ensure_token_cache(sources[0], spec.model.tokenizer, spec.folder / "data", spec.arguments.document_frame)
    windows = packed.tokens // spec.arguments.seq_length
    batch = int(spec.deepspeed["train_batch_size"])
    steps = epochs * windows / batch
    if steps > MOST:
        raise ValueError(
            f"--epochs {epochs:g}: reading {windows:,} sequences so often, {batch} at a time, is more than {MOST:,} "
            f"steps; give at most {MOST * batch // windows:,}"
        )
    return max(1, math.ceil(steps))


def scheduled_steps_of_saved_run(spec: RunSpec) -> int | None:
    """Return the `max_steps` that the schedules of a saved run were made for, if `spec` makes the run longer.

    Only a run with a frozen mask can become longer: the schedule of the mask, in fractions of `max_steps`, is over.

    Returns:
        None where the run keeps its length.

    Raises:
        ValueError: the run is beyond `spec`'s steps already, or its learning rate has come down to 0.
    """
    # Read the steps that the saved run was started with.
    saved = list_checkpoints(spec.folder / "checkpoints")
    record = spec.folder / "sparseforge.json"
    if not spec.arguments.resume or not saved or not record.is_file():
        return None
    try:
        saved_config = RunState.parse({"step": 0, "refreshes": 0, **read_json_object(record)}, str(record)).config
    except ValueError:
        return None  # `check_beginning` says what is wrong

    # Compare them with the steps asked for and the step reached.
    steps = spec.config.max_steps
    scheduled = saved_config.max_steps
    reached = checkpoint_step(saved[-1])
    if scheduled <= steps < reached:
        raise ValueError(
            f"--max_steps {steps}: the run in {spec.folder} is already at step {reached}; give more to go on, or "
            "move its newer checkpoints away to go back"
        )
    if not scheduled < steps or reached < saved_config.release_step:
        return None
    if dataclasses.replace(spec.learning_rate, max_steps=scheduled).end == 0:
        raise ValueError(
            f"--max_steps {steps}: the learning rate of the run in {spec.folder} ends at 0 at step {scheduled}, so "
            "that more steps would change nothing; give --min_lr_ratio, like 0.1, or another --lr_scheduler_type"
        )
    return scheduled


def with_more_steps(spec: RunSpec, scheduled: int) -> RunSpec:
    """Return `spec` with the same number of steps, but with the schedules of a run of `scheduled` steps."""
    config = dataclasses.replace(spec.config, max_steps=scheduled)
    deepspeed = {**spec.deepspeed, "sparseforge": config.to_dict()}
    return dataclasses.replace(spec, config=config, deepspeed=deepspeed, steps=spec.config.max_steps)
