"""One run from its command line to its exit code: check, pack, build, train."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from sparseforge_ds.checkpoint.disk import write_json
from sparseforge_ds.config.arguments import RunArguments, flags
from sparseforge_ds.config.command_line import UnknownFlagError, parse_arguments
from sparseforge_ds.extension_locks import clear_before_training
from sparseforge_ds.forge import ForgeError
from sparseforge_ds.ranks import AgreedError, Ranks
from sparseforge_ds.train.banner import banner
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.compiler import require_compiler
from sparseforge_ds.train.console import set_up_console
from sparseforge_ds.train.engine import build
from sparseforge_ds.train.evaluation import Evaluation, open_held_out
from sparseforge_ds.train.launcher import (
    rank_from_launcher,
    set_default_environment,
    unlink_shared_buffers,
    world_size_from_launcher,
)
from sparseforge_ds.train.length import scheduled_steps_of_saved_run, steps_of_epochs, with_more_steps
from sparseforge_ds.train.loop import RunDivergedError, run_result, train
from sparseforge_ds.train.monitoring import Monitor
from sparseforge_ds.train.open_batches import open_batches
from sparseforge_ds.train.preemption import Preemption, Stopped
from sparseforge_ds.train.resume import continue_from, find_resumption, load_position
from sparseforge_ds.train.run_folder import (
    check_folder,
    check_weights,
    lock_folder,
    why_nothing_to_resume,
    write_folder,
)
from sparseforge_ds.train.spec import RunSpec, make_spec, read_config
from sparseforge_ds.train.tracking import Trackers, flat

_LOG = logging.getLogger(__name__)


def run(arguments: RunArguments, preemption: Preemption) -> None:
    """Do a whole run on this rank.

    Raises:
        ValueError: something in the input is wrong; AgreedError where all ranks raise it together.
        OSError: something cannot be written.
        Stopped: SIGTERM or Ctrl-C ended the training, and it is saved.
    """
    clear_before_training()
    deepspeed.init_distributed()
    unlink_shared_buffers()
    ranks = Ranks()
    spec = ranks.all_or_raise(lambda: make_spec(arguments, ranks.world_size))
    held_out = open_held_out(spec, ranks)  # a mistake there is seen before all of the text to train on is read
    if arguments.epochs is not None:
        steps = ranks.on_first(lambda: steps_of_epochs(spec))
        _LOG.info(f"--epochs {arguments.epochs:g}: {steps} steps")
        arguments = dataclasses.replace(arguments, epochs=None, max_steps=steps)
        spec = ranks.all_or_raise(lambda: make_spec(arguments, ranks.world_size))
    laid_out = ranks.on_first(lambda: scheduled_steps_of_saved_run(spec))
    if laid_out is not None:
        spec = with_more_steps(spec, laid_out)
    # The others may not see yet whether there is something to resume.
    anew = ranks.on_first(lambda: why_nothing_to_resume(spec))
    if anew is not None:
        _LOG.info(anew)
        spec = dataclasses.replace(spec, arguments=dataclasses.replace(arguments, resume=False))
    checkpoints = Checkpoints(spec.folder / "checkpoints", ranks, spec.stage, arguments.keep_checkpoints)
    ranks.all_or_raise(lambda: check_folder(spec))
    if spec.arguments.resume:
        ranks.on_first(lambda: check_weights(spec))
    ranks.all_or_raise(lambda: require_compiler(torch.device(get_accelerator().current_device_name())))
    ranks.on_first(lambda: lock_folder(spec.folder))
    ranks.on_first(checkpoints.recover)
    found = find_resumption(spec, ranks, checkpoints) if spec.arguments.resume else None
    batches = open_batches(spec, ranks)
    if found is not None:
        ranks.all_or_raise(lambda: load_position(found, batches))
    batches.prepare_step()
    begun = 0 if found is None else found.manifest.step
    logs = ranks.first and (found is None or begun < spec.steps)
    # Once the text is there, so that none is left of a run without; and before the model, because one may want a login.
    trackers = ranks.all_or_raise(
        lambda: Trackers(arguments.report_to, spec.folder, arguments.project, begun) if logs else None
    )
    described = banner(spec, batches.summary(spec.steps))
    _LOG.info(described)

    context = build(spec, ranks, batches)
    evaluation = Evaluation(context, held_out)
    if found is not None:
        continue_from(found, context, evaluation)
        ranks.on_first(lambda: checkpoints.name_best(evaluation.ranking()))  # a kill may have kept it from being named
    ranks.on_first(lambda: write_folder(spec))
    start, max_steps = context.forge.step_count, spec.steps
    result_file = spec.folder / "result.json"
    if found is not None and start >= max_steps:
        if ranks.first and not result_file.exists():  # a kill came between the last checkpoint and its result
            write_json(result_file, run_result(context, evaluation, start))
        _LOG.info(f"the run in {spec.folder} is complete ({start} steps): nothing to do")
        ranks.leave()
        return
    ranks.on_first(lambda: result_file.unlink(missing_ok=True))  # of an earlier start
    if trackers is not None:
        trackers.settings(_settings(spec), described, start)
    monitor = Monitor(
        trackers, start, max_steps, spec.tokens_per_step, arguments.log_every, getattr(context.engine, "monitor", None)
    )
    with contextlib.closing(monitor):
        preemption.begin_training()
        try:
            result = train(context, checkpoints, monitor, preemption, evaluation)
        except Stopped:
            ranks.leave()
            raise
        except RunDivergedError as error:
            if ranks.first:  # the others may not come here any more
                good = None if error.last_good_checkpoint is None else str(error.last_good_checkpoint)
                write_json(result_file, {"diverged": str(error), "last_good_checkpoint": good})
            raise
    ranks.on_first(lambda: write_json(result_file, result))
    _LOG.info(_farewell(spec.folder, result, "tensorboard" in arguments.report_to))
    ranks.leave()


def main(
    command_line: Sequence[str] | None = None, dry_run: Callable[[RunArguments], Iterable[str]] | None = None
) -> int:
    """The launcher's whole body: run, and turn what went wrong into one line and an exit code on every rank.

    Args:
        command_line: the flags; None for those of the process.
        dry_run: describes a run in sections, for `--dry_run`. It needs the planner, an extra.

    Returns:
        0 when the run is complete, 1 after an error, 2 for a flag that does not exist; 143 when SIGTERM, 130 when
        Ctrl-C stopped it, saved if it trained.
    """
    set_up_console()
    try:
        arguments = parse_arguments(command_line)
        if arguments.dry_run and dry_run is None:
            raise ValueError("--dry_run: the planner is not here; give it to `sparseforge train`")
        if not arguments.dry_run:
            read_config(arguments, world_size_from_launcher())
            set_default_environment()
    except (ValueError, OSError) as error:  # every rank has found it by itself, and each machine says it once
        return _fail(error, os.environ.get("LOCAL_RANK", "0") == "0")
    try:
        if dry_run is None or not arguments.dry_run:
            with Preemption() as preemption:
                run(arguments, preemption)
        elif rank_from_launcher() == 0:  # the others would say the same
            for section in dry_run(arguments):
                print(f"{section}\n", flush=True)
    except Stopped as stop:
        _LOG.info(f"stopped by {stop}; continue with --resume")
        return stop.exit_code
    except (ValueError, OSError, ForgeError) as error:  # every rank has the agreed ones; others may be its own
        return _fail(error, rank_from_launcher() == 0 or not isinstance(error, (AgreedError, ForgeError)))
    return 0


def _fail(error: Exception, aloud: bool) -> int:
    if aloud:
        _LOG.error(error)
    return 2 if isinstance(error, UnknownFlagError) else 1


def _settings(spec: RunSpec) -> dict[str, Any]:
    """The run flags, the keys of the block, and how the run is laid out, by name."""
    layout = {"zero_stage": spec.stage, "ranks": spec.world_size, "dtype": str(spec.dtype).removeprefix("torch.")}
    batch = {"global_batch": spec.deepspeed["train_batch_size"], "max_steps": spec.steps}
    return flat({**flags(spec.arguments), **layout, **batch, "sparseforge": spec.config.to_dict()})


def _farewell(folder: Path, result: dict[str, Any], logged: bool) -> str:
    log, run, model = (shlex.quote(str(path)) for path in (folder / "tensorboard", folder, folder / "export"))
    return (
        f"done: {result['steps']} steps, {result['tokens']:,} tokens in all, {result['seconds']:.0f} s\n"
        + (f"  tensorboard --logdir {log}\n" if logged else "")
        + f"  sparseforge consolidate {run} {model}"
    )


if __name__ == "__main__":
    raise SystemExit("error: this module is run as `sparseforge train`")
