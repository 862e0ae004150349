"""Whether every method of a comparison can run on its model, found before the first of them trains."""

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
from sparseforge_ds.extras.studies.texts import identity
from sparseforge_ds.train.spec import RunSpec, make_spec

_KINDS = (".safetensors", ".bin", ".json", ".model", ".txt")
"""Of the files of a model that decide what it computes."""


@dataclass(frozen=True)
class Checked:
    """What is known of the runs of a method before they start."""

    config: SparseForgeConfig
    """With the globs that `--any_family` has chosen."""
    files: dict[str, str]
    """Hashes of what the files hold that its runs read."""


def check_methods(config: CompareConfig) -> dict[str, Checked]:
    """Read the model's shapes once for every method and budget, and its weights never; by the names of methods.

    Raises ValueError where a method refuses the model, a flag or the text, as its own run would, hours into the study,
    or where peft is missing, by which its models are measured.
    """
    first = config.seeds[0]
    trained = [
        ("methods", Run(method, method.learning_rates[0], first, steps, decay=next(iter(method.decays), None)))
        for method in config.methods.values()
        for steps in config.budgets
    ]
    untrained = [("one_shot", Run(method, NO_TRAINING, first, 0, trained=False)) for method in config.one_shot.values()]
    found: dict[str, Checked] = {}
    with TemporaryDirectory() as folder:
        for kind, run in [*trained, *untrained]:
            place = Path(folder) / "run"
            settings = place.with_name("run.json")
            settings.write_text(json.dumps(run.deepspeed(config)))
            try:
                spec = make_spec(parse_arguments(run.arguments(config, place)), config.ranks)
            except ValueError as error:
                said = str(error).replace(str(settings), "base")
                raise ValueError(f"{kind}.{run.method.name} with {run.steps} steps: {said}") from None
            if spec.config.low_rank is not None and importlib.util.find_spec("peft") is None:
                raise ValueError(
                    f"{kind}.{run.method.name}: peft is missing, through which models with low_rank are measured; pip "
                    "install 'sparseforge_ds[peft]'"
                )
            if run.method.name not in found:
                found[run.method.name] = Checked(spec.config, _files_of(spec))
    return found


def _files_of(spec: RunSpec) -> dict[str, str]:
    models = {"model_files": spec.model, "teacher_files": spec.teacher}
    held = {name: _contents(model.folder) for name, model in models.items() if model is not None}
    return {"dataset_files": identity([source.facts for source in spec.text.sources]), **held}


def _contents(folder: Path) -> str:
    paths = tuple(sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _KINDS))
    return identity(Files(folder, paths).contents)
