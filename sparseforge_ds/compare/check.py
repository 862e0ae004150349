"""Whether every method of a comparison can run on its model, found before the first of them trains."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from sparseforge_ds.compare.runs import NO_TRAINING, Run
from sparseforge_ds.compare.settings import CompareConfig
from sparseforge_ds.config.command_line import parse_arguments
from sparseforge_ds.train.spec import make_spec


def check_methods(config: CompareConfig) -> None:
    """Read the model's shapes once for every method and budget, and its weights never.

    Raises ValueError where a method refuses the model, a flag or the text, as its own run would, hours into the study.
    """
    first = config.seeds[0]
    trained = [
        ("methods", Run(method, method.learning_rates[0], first, steps, decay=next(iter(method.decays), None)))
        for method in config.methods.values()
        for steps in config.budgets
    ]
    untrained = [("one_shot", Run(method, NO_TRAINING, first, 0, trained=False)) for method in config.one_shot.values()]
    with TemporaryDirectory() as folder:
        for kind, run in [*trained, *untrained]:
            place = Path(folder) / "run"
            settings = place.with_name("run.json")
            settings.write_text(json.dumps(run.deepspeed(config)))
            try:
                make_spec(parse_arguments(run.arguments(config, place)), config.ranks)
            except ValueError as error:
                said = str(error).replace(str(settings), "base")
                raise ValueError(f"{kind}.{run.method.name} with {run.steps} steps: {said}") from None
