"""Checks of every method of a comparison against its model, before the first run trains."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.command_line import parse_arguments
from sparseforge_ds.data.splits import Files
from sparseforge_ds.data.teacher_logits import matching_records, require_finished
from sparseforge_ds.evaluate.scored_text import iter_texts
from sparseforge_ds.extras.studies.assessment import Evaluator
from sparseforge_ds.extras.studies.runs import Pruning, Run
from sparseforge_ds.extras.studies.settings import CompareConfig
from sparseforge_ds.extras.studies.texts import Texts, content_hash, read_texts
from sparseforge_ds.extras.studies.training import require_devices
from sparseforge_ds.mask.pattern import require_removing
from sparseforge_ds.model.any_family import any_family
from sparseforge_ds.model.architecture import bare_model
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.model.pretrained import find_model
from sparseforge_ds.start.blocks import decoder_blocks
from sparseforge_ds.start.first_mask import mask_for
from sparseforge_ds.train.spec import RunSpec, make_spec

_SUFFIXES = (".safetensors", ".bin", ".json", ".model", ".txt")
"""Suffixes of the files of a model that decide what it computes."""


@dataclass(frozen=True)
class MethodCheck:
    """Facts about the runs of a method, known before they start."""

    config: SparseForgeConfig
    """The method's block, with the globs that `--any_family` has chosen."""
    files: dict[str, str]
    """Hashes of the contents of the files that its runs read."""
    hardware: dict[str, str]
    """Dtype that its runs compute in here, where "auto" is decided, and the kind of device."""


def check_methods(config: CompareConfig) -> dict[str, MethodCheck]:
    """Check every method at every budget against the model's shapes, and return the checks by method name.

    The model's weights are not read.

    Raises:
        ValueError: a method refuses the model, a flag or the text, as its own run would hours into the study; or peft
            is missing, which measuring a method's models needs.
    """
    # One run stands for all learning rates and seeds of a method and budget.
    first = config.seeds[0]
    runs = [
        Run(method, method.learning_rates[0], first, steps, decay=next(iter(method.decays), None))
        for method in config.methods.values()
        for steps in config.budgets
    ]
    checks: dict[str, MethodCheck] = {}
    with TemporaryDirectory() as folder:
        for run in runs:
            # Parse the run's own command line, as the trainer will.
            run_folder = Path(folder) / "run"
            settings = run_folder.with_name("run.json")
            settings.write_text(json.dumps(run.deepspeed(config)))
            try:
                spec = make_spec(parse_arguments(run.arguments(config, run_folder)), config.ranks)
                if run.method.name not in checks:
                    checks[run.method.name] = _check_of(spec)
            except ValueError as error:
                message = str(error).replace(str(settings), "base")
                raise ValueError(f"methods.{run.method.name} with {run.steps} steps: {message}") from None
            if spec.config.low_rank is not None and importlib.util.find_spec("peft") is None:
                raise ValueError(
                    f"methods.{run.method.name}: peft is missing; measuring models with low_rank needs it. Run pip "
                    "install '.[peft]' in the checkout"
                )
    return checks


def check_prunings(config: CompareConfig) -> None:
    """Check every model that is pruned without a run, by the shapes of the dense one and the beginning of the text.

    Raises:
        ValueError: `sparseforge prune` would refuse the model, the mask or the text.
    """
    dense = find_model(config.model, "model")
    for entry in config.one_shot.values():
        try:
            empty = bare_model(dense.config)
            block = SparseForgeConfig.from_dict(config.one_shot_block(entry))
            weights = prunable_weights(empty, any_family(empty, block) if entry.any_family else block)
            mask_for(entry.start, weights, require_removing(block.parsed_pattern))
            decoder_blocks(empty, weights)
            next(iter_texts(Pruning(entry, 0).text(config), config.text_field))
        except ValueError as error:
            raise ValueError(f"one_shot.{entry.name}: {error}") from None


def _check_of(spec: RunSpec) -> MethodCheck:
    hardware = {"dtype": str(spec.dtype).removeprefix("torch."), "device": spec.device}
    return MethodCheck(spec.config, _file_hashes(spec), hardware)


def _file_hashes(spec: RunSpec) -> dict[str, str]:
    models = {"model_files": spec.model, "teacher_files": spec.teacher}
    hashes = {name: _folder_hash(model.folder) for name, model in models.items() if model is not None}
    if spec.arguments.teacher_logits is not None and spec.config.distillation is not None:
        folder = Path(spec.arguments.teacher_logits)
        records = matching_records(folder, spec.arguments.seq_length, spec.config.distillation.temperature)
        require_finished(folder, records)
        # The folder may have logits of other texts, too, and gets more: only those of one teacher are one condition.
        hashes["logits_files"] = content_hash(sorted({str(record.origin) for record in records}))
    return {"dataset_files": content_hash([source.facts for source in spec.text.sources]), **hashes}


def _folder_hash(folder: Path) -> str:
    paths = tuple(sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _SUFFIXES))
    return content_hash(Files(folder, paths).contents)


class StudyCheck(NamedTuple):
    """Texts, method checks and evaluator of a study, made while it is checked."""

    texts: Texts
    checks: dict[str, MethodCheck]
    """Checks of the methods, by their names."""
    evaluator: Evaluator


def check_study(config: CompareConfig, with_notes: bool = True) -> StudyCheck:
    """Check a study before its first row, without writing to its folder and without loading a model's weights.

    Args:
        config: the comparison.
        with_notes: as in `read_texts`.

    Raises:
        ValueError: a model or a text is missing, or a method, a pruning, the tasks, threads or GPUs do not fit.
    """
    if config.threads is None:
        threads_of_environment()
    require_devices(config.ranks)
    texts = read_texts(config, with_notes)
    checks = check_methods(config)
    check_prunings(config)
    return StudyCheck(texts, checks, Evaluator(config, texts, checks[config.compared_with].config))


def threads_of_environment() -> int | None:
    """Return the threads that OMP_NUM_THREADS asks for, or None if it is unset."""
    value = os.environ.get("OMP_NUM_THREADS") or None
    if value is not None and not (value.isdecimal() and int(value)):
        raise ValueError(f"OMP_NUM_THREADS={value}: use an integer >= 1, or unset it")
    return None if value is None else int(value)
