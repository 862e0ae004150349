"""A run's folder: its files at the start of a run, and checks that a run may start or continue in it.

    OUTPUT_DIR/
      sparseforge.json   the algorithm, the weights under a mask, the run flags, versions
      ds_config.json     the resolved DeepSpeed configuration
      model/             config and tokenizer of the model, no weights
      data/              the token cache
      checkpoints/       DeepSpeed checkpoints (see checkpoints.py)
      tensorboard/       event files, where --report_to names it
      .lock              held by the process that works here
      result.json        steps, losses and scores, written at the run's end

All machines of a run must see it.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import transformers
from transformers import GenerationConfig

import sparseforge_ds
from sparseforge_ds.checkpoint.disk import atomic_folder, take_lock, write_json
from sparseforge_ds.checkpoint.folder import checkpoint_step, list_checkpoints, read_json_object
from sparseforge_ds.checkpoint.model_files import is_legal_file
from sparseforge_ds.checkpoint.tensors import fingerprint_weights
from sparseforge_ds.config.arguments import RunArguments, flags
from sparseforge_ds.config.batch import batch_line
from sparseforge_ds.config.run_state import RunState, differences, shorten
from sparseforge_ds.data.mixture import source_and_share
from sparseforge_ds.data.tokenization import dtype_of_ids
from sparseforge_ds.model.basis import PERMUTATION, ROTATION, basis_of, keep_basis
from sparseforge_ds.model.hub_access import public_name
from sparseforge_ds.model.stored_config import config_sha256
from sparseforge_ds.train.banner import readable_bytes
from sparseforge_ds.train.lasting_memory import checkpoint_bytes
from sparseforge_ds.train.spec import RunSpec

_LOG = logging.getLogger(__name__)


def run_description(spec: RunSpec) -> dict[str, Any]:
    """Return the content of `sparseforge.json`; plain JSON types."""
    run = RunState.from_weights(spec.config, spec.weights).to_dict()
    del run["step"], run["refreshes"]  # the checkpoints have them
    packages = (sparseforge_ds, torch, deepspeed, transformers)
    description = {
        **run,
        "coverage": asdict(spec.coverage),
        "model_type": spec.model.config.model_type,
        "run": flags(spec.arguments),
        "public_names": _public_names(spec.arguments),
        "versions": {package.__name__: package.__version__ for package in packages},
    }
    return dict(json.loads(json.dumps(description)))


def _public_names(arguments: RunArguments) -> dict[str, Any]:
    """Return the names of models and texts for cards. Paths exist here, so that they can be told from hub ids."""
    models = {"model": arguments.model, "teacher": arguments.teacher}
    names = {key: public_name(name) for key, name in models.items() if name is not None}
    if arguments.eval_dataset is not None:
        names["eval_dataset"] = public_name(arguments.eval_dataset)
    return {**names, "dataset": [public_name(source_and_share(value)[0]) for value in arguments.dataset]}


def check_run_folder(spec: RunSpec) -> None:
    """Reject a folder that holds another run, or nothing to resume, or that cannot take the checkpoints.

    Raises:
        ValueError: a fresh run would overwrite checkpoints, the run to resume is not this one, the folder cannot be
            written, or the disk is too full.
    """
    try:
        check_beginning(spec)  # before a folder is made whose name was mistyped
        spec.folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=spec.folder).close()  # on every rank
    except OSError as error:
        raise ValueError(
            f"--output_dir {spec.folder}: cannot be written ({error.strerror}); give another folder"
        ) from None
    # Files of an interrupted save count as free: a launch removes them before it writes anything.
    leftovers = sum(file.stat().st_size for file in spec.folder.glob("checkpoints/*.tmp/*") if file.is_file())
    check_room(spec, shutil.disk_usage(spec.folder).free + leftovers)


def check_weights(spec: RunSpec) -> None:
    """Reject a run to resume whose model or teacher has other weights than before, under the same name or another.

    `--teacher` may name another folder, as the log then says. Reads samples of the weights: rank 0 only.

    Raises:
        ValueError: the weights have changed, or cannot be read.
    """
    record = read_json_object(spec.folder / "sparseforge.json")
    before = record.get("weights_sha256")
    if not isinstance(before, dict):  # a run of an earlier version
        return
    run = record.get("run")
    other_teacher = isinstance(run, dict) and run.get("teacher") != spec.arguments.teacher
    for role, now in _weights_sha256(spec).items():
        if now != before.get(role) and not (role == "teacher" and other_teacher):
            raise ValueError(
                f"--resume: the weights of --{role} {getattr(spec.arguments, role)} are not those that the run in "
                f"{spec.folder} was started with; bring them back, or start in a new --output_dir"
            )


def _weights_sha256(spec: RunSpec) -> dict[str, str]:
    """Return a hash of the weights of the model, and of a teacher that is another one."""
    models = {"model": spec.model} | ({} if spec.teacher in (None, spec.model) else {"teacher": spec.teacher})
    return {role: fingerprint_weights(model.folder) for role, model in models.items() if model is not None}


def check_room(spec: RunSpec, free: int) -> None:
    """Raise ValueError where checkpoints and tokens of streams take more than `free` bytes."""
    checkpoints, tokens = bytes_of_checkpoints(spec), bytes_of_streamed_text(spec)
    if checkpoints + tokens > free:
        advice = ", or raise --save_every or lower --keep_checkpoints" if checkpoints > size_of_checkpoint(spec) else ""
        of_streams = f", and the tokens of its streams {readable_bytes(tokens)}" if tokens else ""
        raise ValueError(
            f"--output_dir {spec.folder} has room for {readable_bytes(free)}, but its checkpoints will take about "
            f"{readable_bytes(checkpoints)}{of_streams}; make room{advice}"
        )


def check_beginning(spec: RunSpec) -> None:
    """Reject a folder that holds another run, or nothing to resume; writes nothing.

    Raises:
        ValueError: a fresh run would overwrite checkpoints or files that are not of a run, or the run to resume is not
            this one.
    """
    if spec.arguments.resume:
        _check_same_run(spec)
    elif list_checkpoints(spec.folder / "checkpoints"):
        raise ValueError(
            f"--output_dir {spec.folder} already holds a run with checkpoints; "
            "continue it with --resume, give another folder, or remove this one"
        )
    elif (foreign := _foreign_file(spec.folder)) is not None:
        raise ValueError(
            f"--output_dir {spec.folder} holds {foreign}, which a run would replace and no run has written; give "
            "another folder, or move it"
        )


def _foreign_file(folder: Path) -> str | None:
    """Return a name that a run replaces or removes, in a folder that no run has taken yet; None where there is none."""
    if any((folder / marker).exists() for marker in (".lock", "sparseforge.json")):
        return None
    names = ("model", "model.old", "model.tmp", "ds_config.json", "result.json")
    # An unfinished save may be of a run whose other files are on the disk of another node.
    unfinished = (path for path in folder.glob("checkpoints/*.tmp") if not path.name.startswith("step_"))
    for path in (*(folder / name for name in names), *sorted(unfinished)):
        is_empty_folder = path.is_dir() and not any(path.iterdir())
        if os.path.lexists(path) and not is_empty_folder:
            return str(path.relative_to(folder))
    return None


def why_nothing_to_resume(spec: RunSpec) -> str | None:
    """Return the reason why `--resume` has nothing to resume yet, as a line for the log; None where it has.

    The reason is a run that ended before its first checkpoint or, with `--resume auto`, a folder without any run.

    Raises:
        ValueError: the folder holds another run, or no run at all where one must be.
        OSError: the folder cannot be read.
    """
    if not spec.arguments.resume or list_checkpoints(spec.folder / "checkpoints"):
        return None
    if (spec.folder / "sparseforge.json").exists():
        _check_same_run(spec)
        return (
            f"nothing to resume: the run in {spec.folder} ended before its first checkpoint and begins again at step 0"
        )
    if spec.arguments.resume == "auto":
        return f"nothing to resume: there is no run in {spec.folder.resolve()} yet, so a new one begins at step 0"
    return None


def lock_folder(folder: Path) -> int:
    """Keep other runs out of a run folder while this process lives. Rank 0 only.

    Returns:
        The open file that holds the lock.

    Raises:
        ValueError: another run is at work in the folder, or the lock is a link.
    """
    refusal = f"--output_dir {folder}: another run is at work in it"
    return take_lock(folder / ".lock", refusal, "wait for its end, stop it, or give another folder")


def bytes_of_checkpoints(spec: RunSpec) -> int:
    """Return the bytes of the checkpoints that this run will add to the disk, the one being written included."""
    arguments = spec.arguments
    # A run that is resumed has some on disk already.
    saved = list_checkpoints(spec.folder / "checkpoints") if arguments.resume else []
    steps = spec.steps - (checkpoint_step(saved[-1]) if saved else 0)
    if steps <= 0:  # it is complete
        return 0
    count = -(-steps // arguments.save_every) if arguments.save_every else 1
    if arguments.save_every and spec.config.start is not None and not saved:
        count += 1  # the one at step 0 holds the result of the start
    if arguments.keep_checkpoints:
        count = min(count, arguments.keep_checkpoints + 1 + arguments.keep_best - len(saved))
    return max(count, 1) * size_of_checkpoint(spec)


def size_of_checkpoint(spec: RunSpec) -> int:
    """Return the bytes of one of the checkpoints that this run will add; they are smaller once masks are frozen."""
    saved = list_checkpoints(spec.folder / "checkpoints") if spec.arguments.resume else []
    is_frozen = bool(saved) and checkpoint_step(saved[-1]) >= spec.config.release_step
    return checkpoint_bytes(spec.sizes, spec.memory_settings, is_frozen or None)


def bytes_of_streamed_text(spec: RunSpec) -> int:
    """Return the bytes of streamed text, as tokens, that this run has yet to write."""
    largest_id = spec.model.config.get_text_config().vocab_size - 1
    run_tokens = spec.steps * spec.tokens_per_step
    needed = sum(
        round(share * run_tokens) * np.dtype(dtype_of_ids(largest_id, *source.flags)).itemsize
        for source, share in zip(spec.text.sources, spec.text.shares, strict=True)
        if source.streamed
    )
    written = sum(file.stat().st_size for file in (spec.folder / "data").rglob("chunk_*.bin"))
    return max(0, needed - written)


def write_folder(spec: RunSpec) -> None:
    """Write the files that describe the run.

    Raises:
        OSError: the disk is full.
    """
    write_json(spec.folder / "ds_config.json", spec.deepspeed)
    # The model's folder of a resumed run has been compared already.
    final = spec.folder / "model"
    if not spec.arguments.resume or not final.is_dir():
        with atomic_folder(final, replace=True) as folder:
            _write_model(spec, folder)
    more = {
        "config_sha256": config_sha256(read_json_object(final / "config.json")),
        "weights_sha256": _weights_sha256(spec),
    }
    write_json(spec.folder / "sparseforge.json", {**run_description(spec), **more})


def _write_model(spec: RunSpec, folder: Path) -> None:
    """Write all files of the model but its weights."""
    spec.model.config.save_pretrained(folder)
    spec.model.tokenizer.save_pretrained(folder)
    # transformers saves neither the tokenizer.model that other engines read nor the legal files.
    for file in spec.model.folder.iterdir():
        if file.is_file() and (file.name == "tokenizer.model" or is_legal_file(file.name)):
            shutil.copyfile(file, folder / file.name)
    keep_basis(spec.model.folder, folder)
    if (spec.model.folder / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(spec.model.folder).save_pretrained(folder)


def _check_same_run(spec: RunSpec) -> None:
    """Reject a run to resume that is not the one in the folder: ValueError names the first difference."""
    # The records of the run must be there.
    record_file = spec.folder / "sparseforge.json"
    config_file = spec.folder / "ds_config.json"
    model_file = spec.folder / "model" / "config.json"
    for file in (record_file, config_file, model_file):
        name = file.relative_to(spec.folder)
        if not file.exists() and list_checkpoints(spec.folder / "checkpoints"):
            raise ValueError(
                f"--resume: {spec.folder} has checkpoints, but no {name}, so it cannot be told whether they are "
                "this run's; bring the file back, or start in a new --output_dir"
            )
        if not file.exists():
            raise ValueError(
                f"--resume: no run in {spec.folder} (no {name}); start it without --resume, or with --resume auto"
            )
    path = record_file
    try:
        record = read_json_object(path)
        saved = RunState.parse({"step": 0, "refreshes": 0, **record}, str(path))
        path = config_file
        batch = read_json_object(path)["train_batch_size"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--resume: {path} is damaged or of another version of sparseforge_ds ({error!r:.200}); "
            "start in a new --output_dir"
        ) from None

    # Compare the length, the sparseforge block, and the weights under a mask.
    now = RunState.from_weights(spec.config, spec.weights)
    if saved.config.max_steps != spec.config.max_steps:
        raise ValueError(_other_length(spec, saved.config.max_steps))
    saved_flags = record.get("run")
    saved_seed = saved_flags.get("seed") if isinstance(saved_flags, dict) else None
    if saved_seed not in (None, spec.arguments.seed):  # before the block, which takes its seed from the flag
        raise ValueError(
            f"--resume: the run in {spec.folder} was trained on other data (seed {saved_seed}, here "
            f"{spec.arguments.seed}); give --seed {saved_seed}, or start in a new --output_dir"
        )
    if changes := saved.changes(now):
        if saved.weights != now.weights:
            changes = [*_change_of_model(record, spec), *changes]
        raise ValueError(
            f"--resume: the run in {spec.folder} was started with other settings: {shorten(changes)}; "
            "resume with the same JSON, --model and --max_steps, or start in a new --output_dir"
        )

    # Compare the model: its architecture, and the order and basis of its channels.
    saved_model = read_json_object(model_file)
    model = json.loads(spec.model.config.to_json_string())
    if changes := differences(_architecture(saved_model), _architecture(model), "config"):
        raise ValueError(
            f"--resume: --model {spec.arguments.model} is not what the run in {spec.folder} was started with: "
            f"{shorten(changes)}; resume with the unchanged model"
        )
    is_local = spec.model.folder.is_dir()  # a dry run may know its config only
    if is_local and basis_of(spec.folder / "model") != basis_of(spec.model.folder):
        raise ValueError(
            f"--resume: --model {spec.arguments.model} has its channels in another order or basis than the model that "
            f"the run in {spec.folder} was started with; resume with the unchanged model, its {PERMUTATION} and "
            f"{ROTATION} included"
        )

    # Compare the global batch.
    if batch != spec.deepspeed["train_batch_size"]:
        raise ValueError(
            f"--resume: the run in {spec.folder} has {batch} sequences a step, here there are "
            f"{spec.deepspeed['train_batch_size']} ({batch_line(spec.deepspeed, spec.world_size)}). "
            f"Ranks, ZeRO stage and offload may change, their product may not: give --global_batch {batch}, or set "
            f'train_batch_size to {batch} and the other two to "auto"'
        )


def _change_of_model(record: dict[str, Any], spec: RunSpec) -> list[str]:
    """Return a line for a `--model` that differs from the recorded one; none where it is the same."""
    run = record.get("run")
    now = spec.arguments.model
    before = run.get("model", now) if isinstance(run, dict) else now
    return [] if before == now else [f"--model was {before}, is {now}"]


def _other_length(spec: RunSpec, steps: int) -> str:
    """Return the message for a run whose length cannot change, and the ways that remain."""
    now = spec.config.max_steps
    retrain = (
        f"; or train a finished run's mask further: sparseforge consolidate {shlex.quote(str(spec.folder))} OUT, and a "
        'run in a new --output_dir with --model OUT, --teacher the dense model and "method": "naive_retrain"'
    )
    return (
        f"--resume: the run in {spec.folder} is laid out over {steps} steps, here {now}. The schedules of masks and "
        "learning rate are fractions of max_steps, so that another number makes another run, unless the mask is frozen "
        f"and there are more steps. Resume with --max_steps {steps}; or start a run of {now} steps in a new "
        "--output_dir" + (retrain if spec.config.low_rank is None else "")
    )


def _architecture(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without the keys that depend on the program that wrote it."""
    writer_keys = ("transformers_version", "transformers_weights", "dtype", "torch_dtype")
    return {key: value for key, value in config.items() if key not in writer_keys}
