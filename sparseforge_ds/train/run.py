"""One run from its command line to its exit code: check, pack, build, train."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import transformers

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.config.command_line import parse_arguments
from sparseforge_ds.forge import ForgeError
from sparseforge_ds.ranks import AgreedError, Ranks
from sparseforge_ds.train.banner import banner
from sparseforge_ds.train.checkpoints import Checkpoints
from sparseforge_ds.train.dry_run import dry_run
from sparseforge_ds.train.engine import build
from sparseforge_ds.train.extension_locks import watch_extension_locks
from sparseforge_ds.train.loop import RunDivergedError, train
from sparseforge_ds.train.monitoring import Monitor
from sparseforge_ds.train.plan import Plan, make_plan, read_config
from sparseforge_ds.train.preemption import Preemption, Stopped
from sparseforge_ds.train.ranks import take_place, unlink_shared_buffers, world_size_from_launcher
from sparseforge_ds.train.resume import continue_from, find_resumption, load_position
from sparseforge_ds.train.run_folder import (
    begins_anew,
    changed_flags,
    check_folder,
    lock_folder,
    write_folder,
    write_json,
)
from sparseforge_ds.train.text import open_text


class InstantError(ValueError):
    """A wrong flag, key or batch size, which every rank finds by itself before the processes meet."""


def run(arguments: RunArguments, preemption: Preemption) -> None:
    """Do a whole run on this rank.

    Raises:
        ValueError: something in the input is wrong; AgreedError where all ranks raise it together.
        OSError: something cannot be written.
        Stopped: SIGTERM or Ctrl-C ended the training, and it is saved.
    """
    _quiet()
    _check_at_once(arguments)
    watch_extension_locks()
    deepspeed.init_distributed()
    unlink_shared_buffers()
    ranks = Ranks()
    plan = ranks.all_or_raise(lambda: make_plan(arguments, ranks.world_size))
    plan = _settle_resume(plan, ranks)
    arguments = plan.arguments
    checkpoints = Checkpoints(plan.folder / "checkpoints", ranks, plan.stage, arguments.keep_checkpoints)
    ranks.all_or_raise(lambda: check_folder(plan))
    ranks.on_first(lambda: lock_folder(plan.folder))
    changed = ranks.on_first(lambda: changed_flags(plan)) if arguments.resume else []
    found = find_resumption(plan, ranks, checkpoints) if arguments.resume else None
    batches = open_text(plan, ranks)
    if found is not None:
        ranks.all_or_raise(lambda: load_position(found, batches))
    batches.prepare_step()
    _say(ranks, banner(plan, batches.summary(plan.config.max_steps)))

    context = build(plan, ranks, batches)
    resumed = continue_from(found, context) if found is not None else None
    ranks.on_first(lambda: _open_folder(plan, checkpoints))
    start = context.forge.step_count
    if resumed is not None and start >= plan.config.max_steps:
        _say(ranks, f"the run in {plan.folder} is complete ({start} steps): nothing to do")
    else:
        monitor = Monitor(
            plan.folder if ranks.first else None,
            start,
            plan.config.max_steps,
            plan.tokens_per_step,
            arguments.log_every,
        )
        if resumed is not None:
            monitor.say(resumed)
            for line in changed:
                monitor.say(f"changed since the last start: {line}")
        ranks.on_first(lambda: (plan.folder / "result.json").unlink(missing_ok=True))  # of an earlier start
        preemption.begin_training()
        try:
            result = train(context, checkpoints, monitor, preemption)
        except Stopped:
            ranks.leave()
            raise
        except RunDivergedError as error:
            if ranks.first:  # the others may not come here any more
                write_json(plan.folder / "result.json", {"diverged": str(error)})
            raise
        finally:
            monitor.close()
        ranks.on_first(lambda: write_json(plan.folder / "result.json", result))
        _say(ranks, _farewell(plan.folder, result))
    ranks.leave()


def main(command_line: Sequence[str] | None = None) -> int:
    """The launcher's whole body: run, and turn what went wrong into one line and an exit code on every rank.

    Returns:
        0 when the run is complete, 1 after an error; 143 when SIGTERM, 130 when Ctrl-C stopped it, saved if it trained.
    """
    first = os.environ.get("RANK", "0") == "0"
    try:
        arguments = _parse(command_line)
        if arguments.dry_run:
            return _describe(arguments, first)
        with Preemption() as preemption:
            run(arguments, preemption)
    except Stopped as stop:
        if first:
            print(f"stopped by {stop}; continue with --resume", flush=True)
        return stop.exit_code
    except (AgreedError, ForgeError) as error:  # every rank has it
        return _fail(error, first)
    except InstantError as error:  # found before the processes met: on every rank, so each machine says it once
        return _fail(error, os.environ.get("LOCAL_RANK", "0") == "0")
    except ValueError as error:  # may be this rank's own
        return _fail(error, True)
    except OSError as error:
        return _fail(error, True)
    return 0


def _describe(arguments: RunArguments, first: bool) -> int:
    _quiet()
    if first:  # the others would say the same
        for section in dry_run(arguments):
            print(f"{section}\n", flush=True)
    return 0


def _fail(error: Exception, aloud: bool) -> int:
    if aloud:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return 1


def _say(ranks: Ranks, text: str) -> None:
    if ranks.first:
        print(text, flush=True)


def _settle_resume(plan: Plan, ranks: Ranks) -> Plan:
    """The plan with `resume` said or unsaid: whether there is something to resume, every rank learns from the first."""
    if not plan.arguments.resume:
        return plan
    anew = ranks.on_first(lambda: begins_anew(plan))
    if anew is not None:
        _say(ranks, anew)
    return dataclasses.replace(plan, arguments=dataclasses.replace(plan.arguments, resume=anew is None))


def _farewell(folder: Path, result: dict[str, Any]) -> str:
    log, run, model = (shlex.quote(str(path)) for path in (folder / "tensorboard", folder, folder / "export"))
    return (
        f"done: {result['steps']} steps, {result['tokens']:,} tokens in all, {result['seconds']:.0f} s\n"
        f"  tensorboard --logdir {log}\n"
        f"  sparseforge consolidate {run} {model}"
    )


def _open_folder(plan: Plan, checkpoints: Checkpoints) -> None:
    write_folder(plan)
    checkpoints.folder.mkdir(exist_ok=True)
    checkpoints.recover()


def _parse(command_line: Sequence[str] | None) -> RunArguments:
    try:
        return parse_arguments(command_line)
    except ValueError as error:
        raise InstantError(str(error)) from None


def _check_at_once(arguments: RunArguments) -> None:
    try:
        read_config(arguments, world_size_from_launcher())
        take_place()
    except ValueError as error:
        raise InstantError(str(error)) from None


def _quiet() -> None:
    """Leave the console to the run: DeepSpeed and transformers only warn."""
    deepspeed.utils.logger.setLevel(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


if __name__ == "__main__":
    sys.exit(main())
