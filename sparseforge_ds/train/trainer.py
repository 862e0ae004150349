"""One run from its command line to its exit code: check the input, open the text, load the models, train."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shlex
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from sparseforge_ds.checkpoint.disk import finite, write_json
from sparseforge_ds.config.arguments import RunArguments, flags
from sparseforge_ds.config.command_line import UnknownFlagError, parse_arguments
from sparseforge_ds.config.run_file import run_file_text
from sparseforge_ds.extension_locks import clear_before_training, extension_errors
from sparseforge_ds.forge import ForgeError
from sparseforge_ds.mask.kernels.fisher import token_squares
from sparseforge_ds.mask.kernels.fusing import is_compiled
from sparseforge_ds.ranks import AgreedError, Ranks
from sparseforge_ds.train.banner import banner
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.console import set_up_console
from sparseforge_ds.train.divergence import TrainingDivergedError
from sparseforge_ds.train.engine import build_context
from sparseforge_ds.train.evaluation import Evaluation, open_held_out
from sparseforge_ds.train.launcher import (
    rank_from_launcher,
    restored_environment,
    set_default_environment,
    unlink_shared_buffers,
    world_size_from_launcher,
)
from sparseforge_ds.train.length import scheduled_steps_of_saved_run, steps_of_epochs, with_more_steps
from sparseforge_ds.train.loop import run_result, train
from sparseforge_ds.train.monitoring import Monitor
from sparseforge_ds.train.open_batches import open_batches
from sparseforge_ds.train.preemption import PreemptedError, Preemption
from sparseforge_ds.train.resume import continue_from, find_resumption, load_position
from sparseforge_ds.train.run_folder import (
    check_beginning,
    check_run_folder,
    check_weights,
    lock_folder,
    why_nothing_to_resume,
    write_folder,
)
from sparseforge_ds.train.spec import RunSpec, make_spec, read_settings, settings_of
from sparseforge_ds.train.tracking import Trackers, flatten

_LOG = logging.getLogger(__name__)


def run_training(arguments: RunArguments, preemption: Preemption, checked: RunSpec | None = None) -> None:
    """Do a whole run on this rank.

    Args:
        arguments: the run flags.
        preemption: hears the signals that end a run.
        checked: their `make_spec`, if it was made before the processes are connected.

    Raises:
        ValueError: something in the input is wrong; AgreedError where all ranks raise it together.
        OSError: something cannot be written.
        PreemptedError: SIGTERM or Ctrl-C ended the training, and it is saved.
    """
    # Connect the processes.
    clear_before_training()
    deepspeed.init_distributed()
    unlink_shared_buffers()
    ranks = Ranks()

    # Resolve and check every setting. Held-out text comes first: a mistake in it shows before all text is read.
    spec = ranks.all_or_raise(lambda: checked or make_spec(arguments, ranks.world_size))
    held_out = open_held_out(spec, ranks)
    spec = _settle_length(spec, ranks)
    spec = _settle_resume(spec, ranks)

    # Take possession of the run folder.
    ranks.all_or_raise(lambda: check_run_folder(spec))
    if spec.arguments.resume:
        ranks.on_first(lambda: check_weights(spec))
    ranks.all_or_raise(lambda: require_compiler(torch.device(get_accelerator().current_device_name())))
    ranks.on_first(lambda: lock_folder(spec.folder))
    ranks.on_first(lambda: check_beginning(spec))  # again: the run before may have saved since it was looked for

    # Find the checkpoint to go on from, and the place in the text that belongs to it.
    checkpoints = Checkpoints(spec.folder / "checkpoints", ranks, spec.stage, spec.arguments.keep_checkpoints)
    ranks.on_first(checkpoints.recover)
    resumption = find_resumption(spec, ranks, checkpoints) if spec.arguments.resume else None
    batches = open_batches(spec, ranks)
    if resumption is not None:
        ranks.all_or_raise(lambda: load_position(resumption, batches))
    batches.prepare_step()

    # Start the trackers: after the text, so that a run without text leaves none behind, and before the model, because
    # one may ask for a login.
    saved_step = 0 if resumption is None else resumption.manifest.step
    trackers = ranks.all_or_raise(lambda: _start_trackers(spec, ranks, saved_step))
    description = banner(spec, batches.summary(spec.steps))
    _LOG.info(description)

    # Load the models, start DeepSpeed and the forge, and restore what the checkpoint holds.
    context = build_context(spec, ranks, batches)
    evaluation = Evaluation(context, held_out)
    if resumption is not None:
        continue_from(resumption, context, evaluation)
        ranks.on_first(lambda: checkpoints.name_best(evaluation.ranking()))  # a kill may have come before it was named

    # A run that is complete already has nothing to train; a kill may have come between its last save and its result.
    first_step = context.forge.step_count
    result_file = spec.folder / "result.json"
    if resumption is not None and first_step >= spec.steps:
        if not ranks.on_first(result_file.exists):
            ranks.on_first(lambda: write_json(result_file, finite(run_result(context, evaluation, first_step))))
        _LOG.info(f"the run in {spec.folder} is complete ({first_step} steps): nothing to do")
        ranks.leave()
        return
    ranks.on_first(lambda: write_folder(spec))
    ranks.on_first(lambda: result_file.unlink(missing_ok=True))  # an earlier launch may have left one

    # Train.
    if trackers is not None:
        trackers.settings(_tracked_settings(spec), description, first_step)
    engine_monitor = getattr(context.engine, "monitor", None)
    monitor = Monitor(trackers, first_step, spec.steps, spec.tokens_per_step, spec.arguments.log_every, engine_monitor)
    with contextlib.closing(monitor), contextlib.closing(context.forge):
        try:
            result = train(context, checkpoints, monitor, preemption, evaluation)
        except PreemptedError:
            ranks.leave()
            raise
        except TrainingDivergedError as error:
            if ranks.first:  # the others may not come here any more
                good = None if error.last_good_checkpoint is None else str(error.last_good_checkpoint)
                try:
                    write_json(result_file, {"diverged": str(error), "last_good_checkpoint": good})
                except OSError as full:  # the divergence is what the user must hear of
                    _LOG.warning(f"{result_file} could not be written: {full}")
            raise

    # Tell the result, and what to do with the run.
    ranks.on_first(lambda: write_json(result_file, finite(result)))
    _LOG.info(closing_lines(spec.folder, result, "tensorboard" in spec.arguments.report_to))
    ranks.leave()


def _settle_length(spec: RunSpec, ranks: Ranks) -> RunSpec:
    """Return the settings with the run's number of steps: those of `--epochs`, or more than a saved run had."""
    arguments = spec.arguments
    if arguments.epochs is not None:
        steps = ranks.on_first(lambda: steps_of_epochs(spec))
        _LOG.info(f"--epochs {arguments.epochs:g}: {steps} steps")
        arguments = dataclasses.replace(arguments, epochs=None, max_steps=steps)
        spec = ranks.all_or_raise(lambda: make_spec(arguments, ranks.world_size))
    scheduled = ranks.on_first(lambda: scheduled_steps_of_saved_run(spec))
    return spec if scheduled is None else with_more_steps(spec, scheduled)


def _settle_resume(spec: RunSpec, ranks: Ranks) -> RunSpec:
    """Return the settings of a fresh run where `--resume` has nothing to resume yet; rank 0 decides for all."""
    reason = ranks.on_first(lambda: why_nothing_to_resume(spec))
    if reason is None:
        return spec
    _LOG.info(reason)
    return dataclasses.replace(spec, arguments=dataclasses.replace(spec.arguments, resume=False))


def _start_trackers(spec: RunSpec, ranks: Ranks, saved_step: int) -> Trackers | None:
    """Start the trackers on rank 0 where there is a step to log; return None elsewhere."""
    arguments = spec.arguments
    is_complete = arguments.resume and saved_step >= spec.steps
    if not ranks.first or is_complete:
        return None
    return Trackers(arguments.report_to, spec.folder, arguments.project, saved_step)


def require_compiler(device: torch.device) -> None:
    """Compile one of our functions for a device, where they are compiled at all.

    Raises:
        ValueError: torch.compile does not work on this machine, and the run would end at its first measurement.
    """
    if not is_compiled(device):
        return
    try:
        token_squares(torch.ones(1, 4, device=device))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first_line = lines[0] if lines else repr(error)
        cause = next((line for line in lines if "rror" in line or "ompiler" in line), first_line)
        raise ValueError(
            f"torch.compile does not work for {device.type} on this machine ({cause:.300}); it needs a C++ compiler "
            "and the headers of Python, for GPUs too (Debian and Ubuntu: apt install g++ python3-dev)"
        ) from None


@restored_environment()
def main(
    command_line: Sequence[str] | None = None, dry_run: Callable[[RunArguments], Iterable[str]] | None = None
) -> int:
    """Run from a command line; an error becomes one line of text and an exit code on every rank.

    Args:
        command_line: the flags; None for those of the process.
        dry_run: function that describes a run in sections, for `--dry_run`; it needs the planner, an extra.

    Returns:
        0 when the run is complete, 1 after an error, and 2 for a flag that does not exist. 143 when SIGTERM and 130
        when Ctrl-C stopped the run, which is saved if it trained.

    Raises:
        BrokenPipeError: the reader of the output has gone, as `head` does.
    """
    set_up_console()
    # Find mistakes in the input before processes are connected. Every rank finds them by itself, and each machine
    # prints them once.
    checked = None
    try:
        arguments = parse_arguments(command_line)
        if arguments.dry_run and dry_run is None:
            raise ValueError("--dry_run: this command has no planner; use `sparseforge train --dry_run`")
        if arguments.print_config:
            if rank_from_launcher() == 0:
                content, config = settings_of(arguments)
                print(run_file_text(arguments, content, config.to_dict()), end="", flush=True)
            return 0
        if not arguments.dry_run:
            read_settings(arguments, world_size_from_launcher())
            set_default_environment()
            # Without a GPU, connecting compiles for minutes. Several ranks must be connected to agree on an error.
            if world_size_from_launcher() == 1 and get_accelerator().device_name() == "cpu":
                checked = make_spec(arguments, 1)
    except BrokenPipeError:  # what reads our output has seen enough; the command line ends in silence
        raise
    except (ValueError, OSError) as error:
        return _exit_code(error, os.environ.get("LOCAL_RANK", "0") == "0")
    # Run. Errors that the ranks agreed on are printed once; others belong to a single rank.
    try:
        if dry_run is None or not arguments.dry_run:
            with Preemption() as preemption, extension_errors():
                run_training(arguments, preemption, checked)
        elif rank_from_launcher() == 0:  # the others would print the same
            for section in dry_run(arguments):
                print(f"{section}\n", flush=True)
    except PreemptedError as stop:
        _LOG.info(f"stopped by {stop}; continue with --resume")
        return stop.exit_code
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ForgeError) as error:
        return _exit_code(error, rank_from_launcher() == 0 or not isinstance(error, (AgreedError, ForgeError)))
    return 0


def _exit_code(error: Exception, is_printed: bool) -> int:
    """Return the exit code of an error, and print the error if it is this rank's turn."""
    if is_printed:
        _LOG.error(error)
    return 2 if isinstance(error, UnknownFlagError) else 1


def _tracked_settings(spec: RunSpec) -> dict[str, Any]:
    """Return the run flags, the sparseforge block, ranks and batch as one flat table for trackers.

    Length, batch, learning rate, decay and teacher are those that the run trains with, whether a flag gave them or not.
    """
    engine = {"zero_stage": spec.stage, "ranks": spec.world_size, "dtype": str(spec.dtype).removeprefix("torch.")}
    batch = {
        "global_batch": spec.deepspeed["train_batch_size"],
        "micro_batch": spec.deepspeed["train_micro_batch_size_per_gpu"],
        "gradient_accumulation_steps": spec.deepspeed["gradient_accumulation_steps"],
        "max_steps": spec.steps,
    }
    optimizer = {
        "learning_rate": spec.learning_rate.peak,
        "weight_decay": spec.deepspeed["optimizer"]["params"].get("weight_decay"),
        "teacher": spec.teacher.name if spec.teacher else None,
    }
    return flatten({**flags(spec.arguments), **engine, **batch, **optimizer, "sparseforge": spec.config.to_dict()})


def closing_lines(folder: Path, result: dict[str, Any], has_tensorboard: bool) -> str:
    """Return the last lines of a run: its totals, and the commands that look at it and export it."""
    log, run, model = (shlex.quote(str(path)) for path in (folder / "tensorboard", folder, folder / "export"))
    return (
        f"done: {result['steps']} steps, {result['tokens']:,} tokens in all, {result['seconds']:.0f} s\n"
        + (f"  curves: tensorboard --logdir {log}\n" if has_tensorboard else "")
        + f"  next: sparseforge consolidate {run} {model}"
    )


if __name__ == "__main__":
    raise SystemExit("error: this module is run as `sparseforge train`")
