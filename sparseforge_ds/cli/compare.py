"""`sparseforge compare`: methods, seeds and budgets on one model and one text, as a table, figures and a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.disk import require_writable

_EPILOG = """\
CONFIG names a model, a training, a validation and a test text, methods (keys of the `sparseforge` block), learning
rates, seeds and budgets. Its paths are relative to its own folder, unless they are absolute or begin with a $VARIABLE.
The validation text chooses the learning rate of every method, at the smallest budget, or at each one with
"choose_at_each_budget". The test text decides nothing.
After an interruption, the same command goes on: finished runs are kept, an unfinished one continues. Methods, seeds,
budgets and learning rates may be added to a CONFIG later.

example:
  sparseforge compare studies/stories.json --out runs/stories   # its texts are in $SPARSEFORGE_ASSETS
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge compare`."""
    parser = commands.add_parser(
        "compare",
        help="compare methods x seeds x budgets on one model and one text: table, figures, one page",
        description="Train every method of CONFIG with every seed and budget, on the same tokens in the same order, "
        "and write results.jsonl, table.md, figures and index.html. Needs the extra compare.",
        epilog=_EPILOG,
    )
    parser.add_argument("config", metavar="CONFIG", help="a JSON file, like studies/stories.json")
    parser.add_argument("--out", metavar="DIR", help="folder of the comparison (default: runs/NAME of CONFIG)")
    parser.add_argument("--workers", type=int, metavar="N", help="runs at a time (default: CONFIG's)")
    parser.add_argument("--dry_run", action="store_true", help="count the runs, and check models, texts and methods")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare methods, and print the table."""
    from dataclasses import replace

    from sparseforge_ds.extras.studies.runs import prunings, selection_runs
    from sparseforge_ds.extras.studies.settings import read_comparison

    # Read the study, and count its runs.
    config = read_comparison(args.config)
    if args.workers is not None:
        if args.workers < 1:
            raise ValueError(f"--workers {args.workers}: use an integer >= 1")
        config = replace(config, workers=args.workers)
    counting = len(config.methods) * len(config.seeds) * len(config.budgets)
    print(
        f"{len(selection_runs(config))} runs choose learning rates, {len(prunings(config))} prune without "
        f"training, {counting} count: {len(config.methods)} methods x {len(config.seeds)} seeds x "
        f"{len(config.budgets)} budgets",
        flush=True,
    )

    # Check it, or run it.
    if args.dry_run:
        from sparseforge_ds.extras.studies.check import check_study

        check_study(config, with_notes=False)
        print("every method fits the model and the texts, at every budget")
        return 0
    out = Path(args.out) if args.out is not None else Path("runs") / Path(args.config).stem
    require_writable(out, f"--out {out}")
    try:
        from sparseforge_ds.extras.studies.study import Study
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "pandas", "jinja2"):
            raise
        raise ValueError(
            f"{error.name} cannot be imported ({error}); in the checkout pip install '.[compare]'"
        ) from None
    print(Study(config, out, Path(args.config).read_text()).run())
    print(f"{out / 'index.html'}: table and figures")
    return 0
