"""`sparseforge evaluate`: perplexity and zero-shot accuracy of a model, by one command."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

_EPILOG = """\
--text asks for perplexity, --tasks or --suite (extra zero_shot) for accuracy, and both may be asked for at once.
On several GPUs each has a whole copy of the model and scores its share of a text:
  torchrun --nproc_per_node 8 -m sparseforge_ds evaluate MODEL --text wikitext2
`python -m sparseforge_ds.evaluate.perplexity --help` describes the two protocols, and `... .zero_shot --help` the data.

examples:
  sparseforge evaluate models/qwen3_14b_2to4 --text wikitext2 --seq_length 4096
  sparseforge evaluate models/qwen3_14b_2to4 --suite paper --dense Qwen/Qwen3-14B --json evaluation.json
  sparseforge evaluate Qwen/Qwen3-14B --one_shot 2:4 --text wikitext2 --tasks arc_easy,boolq
"""


def register(commands: Any) -> None:
    """Add the subcommand."""
    from sparseforge_ds.evaluate.flags import add_model_flags, add_task_flags, add_text_flags

    parser = commands.add_parser(
        "evaluate",
        help="perplexity on a text and zero-shot accuracy of a model",
        description="Measure a dense or sparse Hugging Face model: its perplexity on a text, and its accuracy on "
        "the tasks of lm-evaluation-harness.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_flags(parser)
    add_text_flags(parser.add_argument_group("perplexity"))
    add_task_flags(parser.add_argument_group("zero-shot accuracy"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure what is asked for, print it, and write one JSON with `perplexity` and `zero_shot`."""
    asked_tasks = args.tasks is not None or args.suite is not None
    if args.text is None and not asked_tasks:
        raise ValueError("nothing to measure: give --text for perplexity, --tasks or --suite for accuracy, or both")
    given = vars(args)
    for flags, asked, of in (
        (("protocol", "seq_length", "stride", "keep_tail"), args.text is not None, "perplexity; give --text"),
        (("data", "dense", "paper", "markdown"), asked_tasks, "accuracy; give --tasks or --suite"),
    ):
        if not asked and (odd := [flag for flag in flags if given[flag]]):
            raise ValueError(f"--{odd[0]} {given[odd[0]]}: it belongs to {of}, or leave it out")
    from sparseforge_ds.evaluate import perplexity, zero_shot
    from sparseforge_ds.evaluate.pretrained import write_result
    from sparseforge_ds.ranks import launched_ranks

    out, args.json = args.json, None
    found: dict[str, Any] = {"model": args.model}
    try:
        with launched_ranks() as ranks:
            if asked_tasks and ranks.world_size > 1:
                raise ValueError(f"--tasks and --suite run in one process, and there are {ranks.world_size}; use one")
            if args.text is not None:
                found["perplexity"] = perplexity.run(args, ranks)
            if asked_tasks:
                found["zero_shot"] = zero_shot.run(args)
    except ValueError:
        if os.environ.get("RANK", "0") == "0":
            raise
        return 2
    if ranks.first:
        write_result("json", out, json.dumps(found, indent=2))
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit("error: this module is run as `sparseforge evaluate`")
