"""Checks of every method of a comparison against its model, before the first run trains."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.config.command_line import parse_arguments
from sparseforge_ds.data.splits import Files
from sparseforge_ds.extras.studies.runs import NO_TRAINING, Run
from sparseforge_ds.extras.studies.settings import CompareConfig
from sparseforge_ds.extras.studies.texts import content_hash
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


def check_methods(config: CompareConfig) -> dict[str, MethodCheck]:
    """Check every method at every budget against the model's shapes, and return the checks by method name.

    The model's weights are not read.

    Raises:
        ValueError: a method refuses the model, a flag or the text, as its own run would hours into the study; or peft
            is missing, which measuring a method's models needs.
    """
    # One run stands for all learning rates and seeds of a method and budget.
    first = config.seeds[0]
    trained = [
        ("methods", Run(method, method.learning_rates[0], first, steps, decay=next(iter(method.decays), None)))
        for method in config.methods.values()
        for steps in config.budgets
    ]
    untrained = [("one_shot", Run(method, NO_TRAINING, first, 0, trained=False)) for method in config.one_shot.values()]
    checks: dict[str, MethodCheck] = {}
    with TemporaryDirectory() as folder:
        for kind, run in [*trained, *untrained]:
            # Parse the run's own command line, as the trainer will.
            run_folder = Path(folder) / "run"
            settings = run_folder.with_name("run.json")
            settings.write_text(json.dumps(run.deepspeed(config)))
            try:
                spec = make_spec(parse_arguments(run.arguments(config, run_folder)), config.ranks)
            except ValueError as error:
                message = str(error).replace(str(settings), "base")
                raise ValueError(f"{kind}.{run.method.name} with {run.steps} steps: {message}") from None
            if spec.config.low_rank is not None and importlib.util.find_spec("peft") is None:
                raise ValueError(
                    f"{kind}.{run.method.name}: peft is missing; measuring models with low_rank needs it. Run pip "
                    "install 'sparseforge_ds[peft]'"
                )
            if run.method.name not in checks:
                checks[run.method.name] = MethodCheck(spec.config, _file_hashes(spec))
    return checks


def _file_hashes(spec: RunSpec) -> dict[str, str]:
    models = {"model_files": spec.model, "teacher_files": spec.teacher}
    hashes = {name: _folder_hash(model.folder) for name, model in models.items() if model is not None}
    return {"dataset_files": content_hash([source.facts for source in spec.text.sources]), **hashes}


def _folder_hash(folder: Path) -> str:
    paths = tuple(sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _SUFFIXES))
    return content_hash(Files(folder, paths).contents)
